"use strict";
// The budget slider: picks the most expensive policy within the budget and shows what it gives; every number comes from the data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  if (!data.runs.length) return;
  const STEPS = 400;
  const millions = (count) => (count >= 1e9 ? (count / 1e9).toFixed(3) + "G" : (count / 1e6).toFixed(2) + "M");
  const percent = (share, digits) => (100 * share).toFixed(digits);
  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  data.runs.forEach((run, index) => {
    const option = element("option", "", run.label);
    option.value = index;
    at("run").append(option);
  });

  const svg = document.querySelector("#main-figure svg");
  const point = document.createElementNS("http://www.w3.org/2000/svg", "circle");
  point.setAttribute("r", 6);
  point.setAttribute("class", "operating");
  if (svg) svg.append(point);

  const current = () => {
    const run = data.runs[at("run").value || 0];
    const family = document.querySelector("input[name=family]:checked").value;
    const low = run.costs[0], high = run.costs[run.costs.length - 1];
    const share = at("budget").value / STEPS;
    const budget = share >= 1 ? high : low * Math.pow(high / low, share);
    const policies = run.families[family];
    let chosen = 0;
    policies.forEach((policy, index) => { if (policy.budget <= budget) chosen = index; });
    return { run, family, budget, policy: policies[chosen], high, fits: policies[chosen].budget <= budget };
  };

  const showNumbers = ({ run, budget, policy, high, fits }) => {
    at("top1").textContent = percent(policy.top1, 2) + " %";
    at("cost").textContent = millions(policy.mul_adds);
    at("saved").textContent = percent(1 - policy.mul_adds / high, 1) + " %";
    at("budget-text").textContent = millions(budget);
    at("budget").setAttribute("aria-valuetext", millions(budget) + " mul-adds per image");
    const points = 100 * (policy.top1 - run.full_top1);
    const sign = points >= 0 ? "+" : "−";
    at("against").textContent = `${sign}${Math.abs(points).toFixed(2)} points against the whole network's ` +
      `${percent(run.full_top1, 2)} % at ${millions(high)}.` + (policy.q === null ? "" : ` q = ${policy.q}.`) +
      (fits ? "" : " None of these policies is as cheap as that; this is the cheapest.");
    if (svg && data.frame) {
      point.setAttribute("cx", data.frame.x[0] + data.frame.x[1] * policy.mul_adds / 1e6);
      point.setAttribute("cy", data.frame.y[0] + data.frame.y[1] * 100 * policy.top1);
      point.style.stroke = run.colour;
    }
  };

  const showExits = ({ run, policy }) => {
    at("exits").replaceChildren(...run.costs.map((cost, k) => {
      const row = element("div", "exit");
      row.append(element("span", "", `exit ${k + 1}`));
      const bar = element("div", "bar"), fill = element("i");
      fill.style.width = percent(policy.shares[k], 3) + "%";
      fill.style.background = run.colour;
      bar.append(fill);
      const last = k === run.costs.length - 1;
      const threshold = last ? null : policy.thresholds[k];
      const from = last ? "takes all that is left" : threshold === null ? "nobody leaves here"
        : `leaves from confidence ${threshold.toFixed(4)}`;
      row.append(bar, element("span", "share", percent(policy.shares[k], 1) + " %"),
        element("span", "from", `${from}, costs ${millions(cost)}`));
      return row;
    }));
  };

  const strip = (kind, images, run, k) => {
    const box = element("div", "strip " + kind);
    box.append(element("span", "", `${kind}: ${images.length}`));
    const thumbs = element("div", "thumbs");
    images.slice(0, kind === "right" ? 24 : 12).forEach((i) => thumbs.append(picture(i, run, k)));
    if (!images.length) thumbs.append(element("em", "", "none of those shown"));
    box.append(thumbs);
    return box;
  };

  const picture = (i, run, k) => {
    const made = element("i"), size = 44, { columns, rows, src } = data.sheet;
    made.style.backgroundImage = `url(${src})`;
    made.style.backgroundSize = `${columns * size}px ${rows * size}px`;
    made.style.backgroundPosition = `${-(i % columns) * size}px ${-Math.floor(i / columns) * size}px`;
    const name = (c) => (data.classes[c] === undefined ? `class ${c}` : data.classes[c]);
    const guess = run.images.guesses[k][i], label = run.images.labels[i];
    made.title = guess === label ? name(label) : `exit ${k + 1} says ${name(guess)}; it is ${name(label)}`;
    made.setAttribute("role", "img");
    made.setAttribute("aria-label", made.title);
    return made;
  };

  const showImages = ({ run, policy }) => {
    if (!at("images")) return;
    if (!data.sheet || !run.images) {
      at("images").replaceChildren(element("p", "note", "This run was not tested on the images saved for this page."));
      return;
    }
    at("images").replaceChildren(...run.costs.map((_, k) => {
      const here = [...policy.leaves].flatMap((digit, i) => (parseInt(digit, 36) === k + 1 ? [i] : []));
      const isRight = (i) => run.images.guesses[k][i] === run.images.labels[i];
      const box = element("div", "leaving"), strips = element("div", "strips");
      box.append(element("h3", "", `Exit ${k + 1}: ${percent(policy.shares[k], 1)} % of test images`));
      strips.append(strip("right", here.filter(isRight), run, k),
        strip("wrong", here.filter((i) => !isRight(i)), run, k));
      box.append(strips);
      return box;
    }));
  };

  let waiting = false;
  const show = () => {
    const now = current();
    showNumbers(now);
    showExits(now);
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(() => { waiting = false; showImages(current()); });
    }
  };
  const start = (run) => {  // where the slider begins: the budget at which half of the compute is saved
    const low = run.costs[0], high = run.costs[run.costs.length - 1];
    at("budget").value = Math.round(STEPS * Math.log(Math.max(high / 2, low) / low) / Math.log(high / low));
    at("low").textContent = millions(low);
    at("high").textContent = millions(high);
  };
  const choose = () => { start(data.runs[at("run").value || 0]); show(); };
  at("budget").max = STEPS;
  at("run").addEventListener("change", choose);
  document.querySelectorAll("input[name=family]").forEach((radio) => radio.addEventListener("change", show));
  at("budget").addEventListener("input", show);
  choose();
})();
