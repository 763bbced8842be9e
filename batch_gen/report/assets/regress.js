// Frames side by side in step, curves with a cursor, the trend over nights. Data enters as text and numbers alone.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 400;
  const HEIGHT = 84;
  const EDGE = 6;

  function h(tag, properties, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties ?? {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  }
  function s(tag, properties) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
    return element;
  }
  const plain = (value) => (value === null || value === undefined ? "none" : String(Number(value.toPrecision(5))));

  // A curve of one value per place; `picked` gets the place that was clicked. Values that are null leave a gap.
  function chart(title, unit, values, labels, { bad = null, picked = null } = {}) {
    const known = values.filter((value) => value !== null);
    const low = Math.min(...known);
    const span = Math.max(...known) - low || 1;
    const x = (place) => EDGE + ((WIDTH - 2 * EDGE) * place) / Math.max(1, values.length - 1);
    const y = (value) => HEIGHT - EDGE - ((HEIGHT - 2 * EDGE) * (value - low)) / span;
    const said = `${title}: ${known.length} values from ${plain(low)} to ${plain(low + span)} ${unit}`;
    const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": said });
    let run = [];
    const flush = () => {
      if (run.length) svg.append(s("polyline", { points: (run.length === 1 ? [run[0], run[0]] : run).join(" ") }));
      run = [];
    };
    values.forEach((value, place) => (value === null ? flush() : run.push(`${x(place)},${y(value)}`)));
    flush();
    const line = (name, place) => s("line", { class: name, x1: x(place), x2: x(place), y1: 0, y2: HEIGHT });
    if (bad !== null) svg.append(line("bad", bad));
    const cursor = line("cursor", 0);
    svg.append(cursor);
    const shown = h("b", {}, "");
    const figure = h("figure", { class: "chart", "data-chart": title }, svg, h("figcaption", {}, `${title}: `, shown, ` ${unit}`));
    figure.show = (place) => {
      cursor.setAttribute("x1", x(place));
      cursor.setAttribute("x2", x(place));
      shown.textContent = `${plain(values[place])} at ${labels[place]}`;
    };
    if (picked) {
      svg.addEventListener("click", (event) => {
        const box = svg.getBoundingClientRect();
        const share = ((event.clientX - box.left) / box.width) * WIDTH;
        picked(Math.max(0, Math.min(values.length - 1, Math.round(((share - EDGE) / (WIDTH - 2 * EDGE)) * (values.length - 1)))));
      });
    }
    figure.show(values.length - 1);
    return figure;
  }

  const KINDS = { reference: "Reference", new: "New", difference: `Difference, ${facts.amplify} times` };
  const CURVES = { psnr: ["PSNR", "dB"], ssim: ["SSIM", ""], luma: ["Luma against the baseline", "of 255"], motion: ["Motion", "of 255"] };

  // One case: all kinds show the same frame, moved by slider, keys, buttons and clicks into the curves.
  function player(box, one) {
    const kinds = Object.keys(KINDS).filter((kind) => one.frames.some((frame) => frame[kind]));
    const images = Object.fromEntries(kinds.map((kind) => [kind, h("img", { alt: "", "data-kind": kind })]));
    const slider = h("input", { type: "range", min: 0, max: one.frames.length - 1, step: 1, value: 0, "aria-label": "Frame" });
    const output = h("output", { "aria-live": "polite" }, "");
    const frames = Array.from({ length: one.numFrames }, (_, frame) => `frame ${frame}`);
    const charts = Object.entries(CURVES)
      .filter(([name]) => one.curves[name].length)
      .map(([name, [title, unit]]) => chart(title, unit, one.curves[name], frames, { bad: one.firstBad, picked: (frame) => show(nearest(frame)) }));
    let timer = 0;
    let place = 0;
    const nearest = (frame) => one.frames.reduce((best, item, k) => (Math.abs(item.frame - frame) < Math.abs(one.frames[best].frame - frame) ? k : best), 0);
    function show(next) {
      place = Math.max(0, Math.min(one.frames.length - 1, next));
      const item = one.frames[place];
      for (const [kind, image] of Object.entries(images)) {
        image.hidden = !item[kind];
        if (item[kind]) image.src = item[kind];
        image.alt = `${KINDS[kind]}, frame ${item.frame}`;
      }
      slider.value = place;
      output.textContent = `frame ${item.frame} of ${one.numFrames}`;
      box.dataset.frame = item.frame;
      charts.forEach((figure) => figure.show(Math.min(item.frame, one.numFrames - 1)));
    }
    const play = h("button", { type: "button", "aria-pressed": "false", onclick: toggle }, "Play");
    function toggle() {
      clearInterval(timer);
      const starts = play.getAttribute("aria-pressed") === "false";
      if (starts) timer = setInterval(() => show((place + 1) % one.frames.length), 125);
      play.setAttribute("aria-pressed", String(starts));
      play.textContent = starts ? "Stop" : "Play";
    }
    const to = (name, frame) => (frame === null ? null : h("button", { type: "button", onclick: () => show(nearest(frame)) }, `${name} (${frame})`));
    slider.addEventListener("input", () => show(Number(slider.value)));
    const step = (by, name) => h("button", { type: "button", "aria-label": name, onclick: () => show(place + by) }, by < 0 ? "<" : ">");
    box.append(
      h("div", { class: kinds.length > 1 ? "pictures" : "pictures one" }, ...kinds.map((kind) => h("figure", {}, images[kind], h("figcaption", {}, KINDS[kind])))),
      h("div", { class: "controls" }, step(-1, "Frame back"), step(1, "Frame on"), play, slider, output, to("First bad frame", one.firstBad), to("Worst frame", one.worst)),
      h("div", { class: "charts" }, ...charts),
    );
    if (one.steps.length > 1) {
      const labels = one.steps.map(([number]) => `step ${number}`);
      box.lastChild.append(chart("Velocity error over steps", "relative", one.steps.map(([, distance]) => distance), labels));
    }
    show(one.firstBad === null ? 0 : nearest(one.firstBad));
  }

  for (const box of document.querySelectorAll("[data-player]")) {
    const details = box.closest("details");
    const one = data.cases.find((item) => item.number === Number(box.dataset.player));
    const open = () => { if (details.open && !box.firstChild) player(box, one); };
    details.addEventListener("toggle", open);
    open();
  }

  const nights = document.getElementById("night-charts");
  const add = (title, unit, values) => {
    if (values.some((value) => value !== null)) nights.append(chart(title, unit, values, data.nights));
  };
  add("Seconds of all cases", "s", data.seconds);
  add("Worst PSNR of all frames", "dB", data.psnr);
  add("Cases that did not pass", "", data.failed);
  document.body.classList.add("ready");
})();
