"""What the site takes from the code, so that it cannot go stale: the options of every verb and the list of recipes.

Also the links of the repository's pages that lead out of docs/: on the site they lead to the page of the same file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

CARD_LINK = re.compile(r"\((?:\.\./)+src/offramp/pretrained/([\w-]+)/README\.md\)")
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}


def commands() -> dict[str, Any]:
    """Every verb by its words: `train`, `bench infer`."""
    import typer

    from offramp.cli.app import app

    found: dict[str, Any] = {}

    def walk(words: list[str], command: Any) -> None:
        if hasattr(command, "commands"):
            for name, child in command.commands.items():
                walk([*words, name], child)
        else:
            found[" ".join(words)] = command

    walk([], typer.main.get_command(app))
    return found


def describe(words: str, command: Any) -> str:
    """Usage, help and options of a verb as Markdown."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    usage = ["offramp", words, *(_usage(argument) for argument in arguments), "[OPTIONS]"]
    lines = ["```text", " ".join(usage), "```", "", _prose(command.help or ""), ""]
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{_name(a)}` | {_cell(a.help)} |" for a in arguments]
        lines.append("")
    if options:
        lines += ["| option | meaning | default |", "|---|---|---|"]
        lines += [f"| {_flags(o)} | {_cell(o.help)} | {_default(o)} |" for o in options]
        lines.append("")
    return "\n".join(lines)


def _name(param: Any) -> str:
    return str(param.metavar or param.name).upper().strip("[]")


def _usage(argument: Any) -> str:
    name = _name(argument) + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _prose(text: str) -> str:
    """A docstring's paragraphs; the commands that it shows stand out."""
    return re.sub(r"(?m)(?<!`)(offramp [a-z]+ [^\n]*)$", r"`\1`", text.replace("\f", "").strip())


def _flags(option: Any) -> str:
    flags = [f"`{flag}`" for flag in (*option.opts, *option.secondary_opts)]
    return ", ".join(flags) + ("" if option.is_flag else f" `{option.metavar or _kind(option)}`")


def _kind(option: Any) -> str:
    """What an option takes, in one word; versions of typer keep it in different places."""
    described = getattr(option, "type_descriptor", None)
    name = described.annotation.__name__ if described is not None else option.type.name
    return {"str": "TEXT", "int": "NUMBER", "integer": "NUMBER", "float": "NUMBER"}.get(name, name.upper())


def _default(option: Any) -> str:
    if option.required:
        return "needed"
    value = option.default
    if callable(value) or value is None or value == [] or option.is_flag and not option.secondary_opts:
        return ""
    if option.is_flag:
        return f"`{option.opts[0] if value else option.secondary_opts[0]}`"
    return f"`{value}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", r"\|").replace("\n", " ")


class Verb(SphinxDirective):
    """`{verb} bench infer`: the usage and options of a verb, from the command line itself."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        known = commands()
        if self.arguments[0] not in known:
            raise self.error(f"there is no verb {self.arguments[0]!r}; there are: {', '.join(known)}")
        return self.parse_text_to_nodes(describe(self.arguments[0], known[self.arguments[0]]))


class Recipes(SphinxDirective):
    """`{recipes} cifar100`: the packaged recipes whose names begin so, with claims and what the paper reports."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from offramp.runs.recipe import list_recipes, load_recipe

        found = [load_recipe(name) for name in list_recipes() if name.startswith(self.arguments[0])]
        if not found:
            raise self.error(f"no recipe begins with {self.arguments[0]!r}")
        rows = ["| recipe | claim | the paper's top-1, % |", "|---|---|---|"]
        for recipe in found:
            paper = " ".join(f"{top1:.2f}" for top1 in recipe.paper_top1 or ())
            rows.append(f"| `{recipe.name}` | {_cell(recipe.claim)} | {paper} |")
        return self.parse_text_to_nodes("\n".join(rows))


def lead_home(app: Sphinx, page: str, source: list[str]) -> None:
    """Links to files outside docs/ that the site has as pages, made to lead there."""
    up = "../" * page.count("/")
    text = CARD_LINK.sub(rf"({up}cards/\1.md)", source[0])
    for name, own in OUTSIDE.items():
        text = re.sub(rf"\((?:\.\./)+{re.escape(name)}", f"({up}{own}", text)
    source[0] = text


def pass_over(app: Sphinx, page: str, source: list[str]) -> None:
    """Entries `name*` of a table of contents, for pages that are not written yet."""
    if page == "index":
        there = {path.stem for path in Path(app.srcdir).glob("*.md")}
        for entry in re.findall(r"(?m)^([\w-]+)\*$", source[0]):
            if not any(name.startswith(entry) for name in there):
                source[0] = source[0].replace(f"{entry}*\n", "")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("verb", Verb)
    app.add_directive("recipes", Recipes)
    app.connect("source-read", lead_home)
    app.connect("source-read", pass_over)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
