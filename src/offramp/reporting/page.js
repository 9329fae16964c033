"use strict";
// Opens on the policy that ships; the slider picks the most expensive policy within a budget and shows what it gives. Every number comes from the data.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // Tables that are wider than their place say so.
  const hints = () => document.querySelectorAll(".scroll").forEach((box) => {
    box.nextElementSibling.hidden = box.scrollWidth <= box.clientWidth + 1;
  });
  addEventListener("resize", hints);
  document.querySelectorAll("details").forEach((fold) => fold.addEventListener("toggle", hints));
  hints();

  if (!data.runs.length) return;
  const STEPS = 400, QUIET_MS = 500;
  const millions = (count) => (count >= 1e9 ? (count / 1e9).toFixed(3) + "G" : (count / 1e6).toFixed(2) + "M");
  const percent = (share, digits) => (100 * share).toFixed(digits);
  const short = (ms) => `${Number(ms.toPrecision(3))} ms`;
  const mean = (shares, prices) => shares.reduce((sum, share, k) => sum + share * prices[k], 0);
  const took = (run, policy, own) => (own && run.first_ms ? run.first_ms  // timed as a whole, else by stage times
    : [mean(policy.shares, run.ms), run.ms[run.ms.length - 1]]);

  data.runs.forEach((run, index) => {
    const option = element("option", "", run.label + (run.chosen ? " (ships)" : ""));
    option.value = index;
    at("run").append(option);
  });
  at("run").value = Math.max(0, data.runs.findIndex((run) => run.opens));

  const svg = document.querySelector("#figure-accuracy svg");
  const point = document.createElementNS("http://www.w3.org/2000/svg", "circle");
  point.setAttribute("r", 9);
  point.setAttribute("class", "operating");
  if (svg) svg.append(point);

  let pinned = true;  // the run's own policy is shown, until somebody asks for another
  const current = () => {
    const run = data.runs[at("run").value || 0];
    const family = document.querySelector("input[name=family]:checked").value;
    const low = run.costs[0], high = run.costs[run.costs.length - 1];
    const share = at("budget").value / STEPS;
    const budget = share >= 1 ? high : low * Math.pow(high / low, share);
    if (pinned && run.first) return { run, budget: run.first.budget, policy: run.first, high, fits: true, own: true };
    const policies = run.families[family];
    let chosen = 0;
    policies.forEach((policy, index) => { if (policy.budget <= budget) chosen = index; });
    return { run, budget, policy: policies[chosen], high, fits: policies[chosen].budget <= budget, own: false };
  };

  const showNumbers = ({ run, budget, policy, high, fits, own }) => {
    at("top1").textContent = percent(policy.top1, 2) + " %";
    at("interval").textContent = `95 %: ${percent(policy.interval[0], 1)} to ${percent(policy.interval[1], 1)}`;
    at("cost").textContent = millions(policy.mul_adds);
    at("saved").textContent = percent(1 - policy.mul_adds / high, 1) + " % saved";
    at("timed").hidden = !run.ms;
    if (run.ms) {
      const [ours, whole] = took(run, policy, own);
      at("ms").textContent = short(ours);
      at("faster").textContent = `${(whole / ours).toFixed(2)} times as fast`;
    }
    at("budget-text").textContent = millions(budget) + " mul-adds";
    at("budget").setAttribute("aria-valuetext", millions(budget) + " mul-adds per image");
    const name = run.chosen ? "The policy that ships" : "The suggested policy";
    at("which").textContent = own ? `${name}.` : "Another policy.";
    at("back").hidden = own || !run.first;
    const points = 100 * (policy.top1 - run.full_top1);
    const sign = points >= 0 ? "+" : "−";
    at("against").textContent = `${sign}${Math.abs(points).toFixed(2)} points against the whole network's ` +
      `${percent(run.full_top1, 2)} % at ${millions(high)}` +
      (run.ms ? ` or ${short(took(run, policy, own)[1])}.` : ".") + (policy.q === null ? "" : ` q = ${policy.q}.`) +
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
        : `leaves if its confidence is at least ${threshold.toFixed(4)}`;
      row.append(bar, element("span", "share", percent(policy.shares[k], 1) + " %"),
        element("span", "from", `${from}, costs ${millions(cost)}` + (run.ms ? `, ${short(run.ms[k])}` : "")));
      return row;
    }));
  };

  // What changed is said once the slider rests.
  let speaking = 0;
  const announce = ({ run, policy, high, own }) => {
    clearTimeout(speaking);
    speaking = setTimeout(() => {
      at("said").textContent = `${percent(policy.top1, 2)} % right at ${millions(policy.mul_adds)} mul-adds per image, ` +
        `${percent(1 - policy.mul_adds / high, 1)} % saved` + (run.ms ? `, ${short(took(run, policy, own)[0])}.` : ".");
    }, QUIET_MS);
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
    made.title = guess === label ? `exit ${k + 1} says ${name(guess)}, which is right`
      : `exit ${k + 1} says ${name(guess)}; it is ${name(label)}`;
    made.setAttribute("role", "img");
    made.setAttribute("aria-label", made.title);
    made.tabIndex = -1;
    return made;
  };

  const showImages = ({ run, policy }) => {
    if (!at("images")) return;
    const place = at("images").lastElementChild;
    if (!data.sheet || !run.images) {
      place.replaceChildren(element("p", "note", "This run was not tested on the images saved for this page."));
      return;
    }
    place.replaceChildren(...run.costs.map((_, k) => {
      const here = [...policy.leaves].flatMap((digit, i) => (parseInt(digit, 36) === k + 1 ? [i] : []));
      const isRight = (i) => run.images.guesses[k][i] === run.images.labels[i];
      const box = element("div", "leaving"), strips = element("div", "strips");
      box.append(element("h3", "", `Exit ${k + 1}: ${percent(policy.shares[k], 1)} % of test images`));
      strips.append(strip("right", here.filter(isRight), run, k),
        strip("wrong", here.filter((i) => !isRight(i)), run, k));
      box.append(strips);
      return box;
    }));
    const first = place.querySelector(".thumbs i");
    if (first) first.tabIndex = 0;
  };

  // One image is in the order of the Tab key; arrows go to the others, and a line says what is looked at.
  const look = (image) => { if (image.matches(".thumbs i")) at("looked-at").textContent = `Here ${image.title}.`; };
  if (at("images")) {
    at("images").addEventListener("mouseover", (event) => look(event.target));
    at("images").addEventListener("focusin", (event) => look(event.target));
    at("images").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const every = [...at("images").querySelectorAll(".thumbs i")].filter((image) => image.getClientRects().length);
      const next = every[every.indexOf(event.target) + step];
      if (!step || !every.includes(event.target)) return;
      event.preventDefault();
      if (!next) return;
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }

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
  const changed = () => { show(); announce(current()); };
  const start = (run) => {  // where the slider begins: at its own policy, else where half of the compute is saved
    const low = run.costs[0], high = run.costs[run.costs.length - 1];
    const begin = Math.max(run.first ? run.first.budget : high / 2, low);
    at("budget").value = high > low ? Math.round(STEPS * Math.log(begin / low) / Math.log(high / low)) : STEPS;
    at("low").textContent = millions(low);
    at("high").textContent = millions(high);
    pinned = true;
  };
  const choose = () => start(data.runs[at("run").value || 0]);
  const other = () => { pinned = false; changed(); };
  at("budget").max = STEPS;
  at("run").addEventListener("change", () => { choose(); changed(); });
  at("back").addEventListener("click", () => { choose(); changed(); at("budget").focus(); });
  document.querySelectorAll("input[name=family]").forEach((radio) => radio.addEventListener("change", other));
  at("budget").addEventListener("input", other);
  choose();
  show();
})();
