// What the theme leaves out: names and levels for those who cannot see the page, and wide boxes that can be scrolled by
// keyboard and say that they scroll.
"use strict";

const named = { ".sidebar-drawer": "Pages", ".toc-drawer": "On this page" };
for (const [place, name] of Object.entries(named)) document.querySelector(place)?.setAttribute("aria-label", name);
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

const mark = () => document.querySelectorAll(".table-wrapper, .highlight pre").forEach((box) => {
  const wide = box.scrollWidth > box.clientWidth + 1;
  box.classList.toggle("scrolls", wide);
  if (wide && !box.hasAttribute("tabindex")) {
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    const place = [...document.querySelectorAll(".table-wrapper, .highlight pre")].indexOf(box) + 1;
    box.setAttribute("aria-label", `${box.matches("pre") ? "Code" : "Table"} ${place}, scrolls sideways`);
  }
});
addEventListener("load", mark);
addEventListener("resize", mark);
