"use strict";
// Sends chosen images to /predict and shows the answers; asks /shares every two seconds where images leave.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const SHOWN = 8, EVERY_MS = 2000;
  const percent = (share, digits) => (100 * share).toFixed(digits) + " %";
  const millions = (count) => (count >= 1e9 ? (count / 1e9).toFixed(3) + "G" : (count / 1e6).toFixed(2) + "M");
  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const bar = (share, expected) => {
    const made = element("div", "bar"), fill = element("i", "fill");
    made.setAttribute("aria-hidden", "true");  // the number stands beside it
    fill.style.width = 100 * share + "%";
    made.append(fill);
    if (expected !== undefined) {
      const mark = element("i", "mark");
      mark.style.left = 100 * expected + "%";
      made.append(mark);
    }
    return made;
  };
  const known = (confidence) => typeof confidence === "number";
  const share = (confidence) => element("span", "share", known(confidence) ? percent(confidence, 1) : "–");

  const guessRow = (guess, taken) => {
    const row = element("div", taken ? "guess taken" : "guess"), name = element("span", "name", guess.label);
    row.append(element("span", "", `exit ${guess.exit}`), name, bar(guess.confidence || 0), share(guess.confidence));
    return row;
  };
  const guesses = (prediction) => {
    const box = element("div", "guesses");
    box.append(...prediction.guesses.map((guess) => guessRow(guess, guess.exit === prediction.exit)));
    const why = prediction.forced ? "A limit made it leave at" : "It left at";
    const saved = 1 - prediction.mul_adds / data.costs[data.costs.length - 1];
    box.append(element("p", "why", `${why} exit ${prediction.exit} of ${data.costs.length}, after ` +
      `${millions(prediction.mul_adds)} mul-adds: ` + (saved > 0 ? `${percent(saved, 0)} saved.` : "the whole network.")));
    return box;
  };
  const answer = (prediction, file) => {
    const said = element("div", "said"), sure = element("div", "sure");
    sure.append(bar(prediction.confidence || 0), share(prediction.confidence));
    said.append(element("b", "label", prediction.label), sure, element("span", "file", file.name));
    return said;
  };

  const forget = (image) => { if (image) URL.revokeObjectURL(image.src); };
  const picture = (file) => {
    const made = element("img");
    made.alt = "";
    made.src = URL.createObjectURL(file);
    made.addEventListener("load", () => { made.classList.toggle("small", made.naturalWidth < 96); });
    made.addEventListener("error", () => { forget(made); made.replaceWith(element("i", "blank")); });
    return made;
  };
  const show = (file) => {
    const box = element("article", "result"), said = element("div", "said");
    said.append(element("b", "", "…"), element("span", "file", file.name));
    box.append(picture(file), said);
    at("results").prepend(box);
    for (const old of [...at("results").children].slice(SHOWN)) {
      forget(old.querySelector("img"));
      old.remove();
    }
    return box;
  };
  const announce = (text) => { at("said").textContent = text; };
  const fail = (box, sentence, file) => {
    announce(`${file.name}: ${sentence}`);
    box.classList.add("failed");
    box.querySelector("b").textContent = sentence;
  };

  const send = async (file) => {
    const box = show(file), form = new FormData();
    form.append("images", file);
    try {
      const response = await fetch("predict", { method: "POST", body: form });
      const found = await response.json();
      if (!response.ok) return fail(box, found.detail, file);
      const first = found.predictions[0];
      box.querySelector(".said").replaceWith(answer(first, file));
      announce(`${file.name}: ${first.label}` + (known(first.confidence) ? `, confidence ${percent(first.confidence, 1)}` : ""));
      if (data.reveal) box.append(guesses(first));
    } catch (error) {
      fail(box, "The server does not answer.", file);
    }
    await poll();
  };
  const take = (files) => [...files].slice(0, SHOWN).forEach(send);

  const exitRow = (k, live) => {
    const row = element("div", "exit"), name = element("span", "", `exit ${k + 1}`);
    row.setAttribute("role", "listitem");
    name.append(element("span", "unseen", `, expected ${percent(data.calibration[k], 0)}, now`));
    row.append(name, bar(live ? live[k] : 0, data.calibration[k]),
      element("span", "share", live ? percent(live[k], 0) : "–"));
    return row;
  };
  let answers = true;  // said when it changes; the shares themselves change too often to be read out
  const hear = (now) => {
    if (now !== answers) at("state").textContent = now ? "The server answers again." : "The server does not answer.";
    answers = now;
  };
  const poll = async () => {
    try {
      const live = await (await fetch("shares", { cache: "no-store" })).json();
      at("seen").textContent = live.shares || !live.images
        ? `Shares of the last ${live.images.toLocaleString("en")} images.`
        : "Shown once there are enough images, for privacy.";
      at("exits").replaceChildren(...data.calibration.map((_, k) => exitRow(k, live.images ? live.shares : null)));
      hear(true);
    } catch (error) {
      hear(false);
      at("seen").textContent = "The server does not answer.";
    }
  };

  at("file").addEventListener("change", () => { take(at("file").files); at("file").value = ""; });
  addEventListener("dragover", (event) => { event.preventDefault(); at("drop").classList.add("over"); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) at("drop").classList.remove("over"); });
  addEventListener("drop", (event) => {
    event.preventDefault();
    at("drop").classList.remove("over");
    take(event.dataTransfer.files);
  });
  setInterval(() => { if (!document.hidden) poll(); }, EVERY_MS);
  poll();
})();
