// What the theme leaves out: names and levels for those who cannot see the page, and wide boxes that can be scrolled by
// keyboard and say that they scroll.
"use strict";

const named = { ".sidebar-drawer": "Pages", ".toc-drawer": "On this page" };
for (const [place, name] of Object.entries(named)) document.querySelector(place)?.setAttribute("aria-label", name);
if (!document.querySelector("h1")) {  // the page of what a search found
  const title = document.createElement("h1");
  title.textContent = "Search";
  document.querySelector("#search-results")?.before(title);
}
document.querySelectorAll("[role=heading]:not([aria-level])").forEach((one) => one.setAttribute("aria-level", "2"));
document.querySelectorAll("th").forEach((cell) => {  // a corner without words heads nothing
  if (!cell.textContent.trim()) cell.replaceWith(document.createElement("td"));
});
document.querySelectorAll("dt.sig dl").forEach((list) => {  // arguments, a line each, are no list of definitions
  const lines = [...list.children].map((line) => {
    const own = document.createElement("div");
    own.append(...line.childNodes);
    return own;
  });
  const box = document.createElement("div");
  box.className = "sig-lines";
  box.append(...lines);
  list.replaceWith(box);
});

document.querySelectorAll("code .pre").forEach((word) => word.classList.toggle("whole", word.textContent.length <= 18));
document.querySelectorAll("article p > img:only-child").forEach((image) => image.parentElement.classList.add("picture"));

const kinds = { Table: ".table-wrapper", Code: ".highlight pre", Picture: ".picture" };
const boxes = Object.values(kinds).join(", ");
const mark = () => document.querySelectorAll(boxes).forEach((box) => {
  const wide = box.scrollWidth > box.clientWidth + 1;
  box.classList.toggle("scrolls", wide);
  if (wide && !box.hasAttribute("tabindex")) {
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    const place = [...document.querySelectorAll(boxes)].indexOf(box) + 1;
    const kind = Object.keys(kinds).find((name) => box.matches(kinds[name]));
    box.setAttribute("aria-label", `${kind} ${place}, scrolls sideways`);
  }
});
addEventListener("load", mark);
addEventListener("resize", mark);
