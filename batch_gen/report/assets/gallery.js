// The gallery: search, facets, sort, pages, selection. Its state lives in the address, so that "back" comes back to it.
"use strict";
(() => {
  const { h, icon, get, shown, label } = batchGen;
  const find = (id) => document.getElementById(id);
  const SORTS = [
    "clip_id", "finished_at", "total_s", "denoise_s", "decode_s", "text_s", "encode_s", "verify_s", "upload_s", "queue_wait_s", "step_p50_s", "step_p95_s",
    "bytes", "engine_peak_bytes", "device_peak_bytes", "tokens", "attempt", "duration_s", "seed", "steps", "guidance_high", "guidance_low", "flow_shift", "num_frames", "width", "prompt",
  ];
  const FACETS = ["status", "kind", "class", "extra", "preset", "shape", "steps", "guidance_high", "guidance_low", "flow_shift", "sample", "flags", "attempt", "worker"];
  const MAX_VALUES = 400;
  const FEW = 8;
  const state = { q: "", sort: "clip_id", down: false, page: 0, size: 48, filters: new Map() };
  const selected = new Set();
  const widened = new Set();
  let haystack = [];
  let facets = [];
  let found = [];
  let anchor = null;

  const storageKey = `batch-gen-selection ${batchGen.meta.url}`;
  function recallSelection() {
    try {
      const ids = new Set(JSON.parse(sessionStorage.getItem(storageKey) ?? "[]"));
      for (let clip = 0; clip < batchGen.meta.numClips; clip++) if (ids.has(get("clip_id", clip))) selected.add(clip);
    } catch { /* a selection that cannot be kept is no error */ }
  }
  function keepSelection() {
    try { sessionStorage.setItem(storageKey, JSON.stringify([...selected].map((clip) => get("clip_id", clip)))); } catch { /* as above */ }
  }

  // ---- state <-> address
  function readAddress() {
    const fields = new URLSearchParams(location.hash.slice(1));
    state.q = fields.get("q") ?? "";
    const sort = fields.get("sort") ?? "clip_id";
    state.down = sort.startsWith("-");
    state.sort = sort.replace(/^-/, "");
    if (!SORTS.includes(state.sort)) state.sort = "clip_id";
    state.page = Math.max(0, (parseInt(fields.get("page"), 10) || 1) - 1);
    state.size = [24, 48, 96, 192].includes(Number(fields.get("size"))) ? Number(fields.get("size")) : 48;
    state.filters = new Map();
    for (const [name, value] of fields) if (name.startsWith("f.")) addTo(name.slice(2), value);
  }
  function addTo(name, value) {
    if (!state.filters.has(name)) state.filters.set(name, new Set());
    state.filters.get(name).add(value);
  }
  function writeAddress() {
    const fields = new URLSearchParams();
    if (state.q) fields.set("q", state.q);
    for (const [name, values] of state.filters) for (const value of values) fields.append(`f.${name}`, value);
    if (state.sort !== "clip_id" || state.down) fields.set("sort", (state.down ? "-" : "") + state.sort);
    if (state.page) fields.set("page", state.page + 1);
    if (state.size !== 48) fields.set("size", state.size);
    history.replaceState(null, "", `#${fields}`);
  }

  // ---- what there is to filter by
  const cell = (name, clip) => (name === "shape" ? `${get("width", clip)} x ${get("height", clip)} x ${get("num_frames", clip)}` : shown(name, get(name, clip)));
  function makeFacets() {
    const names = FACETS.flatMap((name) => (name === "extra" ? batchGen.extraNames() : [name]));
    for (const name of names) {
      const cells = new Array(batchGen.meta.numClips);
      const counts = new Map();
      for (let clip = 0; clip < cells.length; clip++) {
        cells[clip] = cell(name, clip);
        counts.set(cells[clip], (counts.get(cells[clip]) ?? 0) + 1);
      }
      const repeats = counts.size < cells.length || name.startsWith("extra.");
      const wanted = name === "status" || (counts.size > 1 && counts.size <= MAX_VALUES && repeats);
      if (wanted) facets.push({ name, cells, values: [...counts.keys()].sort((a, b) => (a === "") - (b === "") || a.localeCompare(b, "en", { numeric: true })) });
    }
  }
  const passes = (facet, clip) => !state.filters.has(facet.name) || state.filters.get(facet.name).has(facet.cells[clip]);

  function makeHaystack() {
    const names = ["clip_id", "prompt", "message", "kind", "worker", "flags", ...batchGen.extraNames()];
    haystack = Array.from({ length: batchGen.meta.numClips }, (_, clip) => names.map((name) => get(name, clip) ?? "").join("\n").toLowerCase());
  }

  // ---- filter, sort
  function filter() {
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = [];
    for (let clip = 0; clip < batchGen.meta.numClips; clip++) if (words.every((word) => haystack[clip].includes(word))) matching.push(clip);
    const active = facets.filter((facet) => state.filters.has(facet.name));
    found = matching.filter((clip) => active.every((facet) => passes(facet, clip)));
    for (const facet of facets) {  // a facet's counts obey all other facets, so that its own values stay comparable
      const others = active.filter((other) => other !== facet);
      facet.counts = new Map();
      for (const clip of matching) {
        if (others.every((other) => passes(other, clip))) facet.counts.set(facet.cells[clip], (facet.counts.get(facet.cells[clip]) ?? 0) + 1);
      }
    }
    sortFound();
  }
  function sortFound() {
    const column = batchGen.columns[state.sort] ?? [];
    const sign = state.down ? -1 : 1;
    found.sort((a, b) => {
      const left = column[a] ?? null;
      const right = column[b] ?? null;
      if (left === right) return a - b;
      if (left === null || right === null) return left === null ? 1 : -1;  // clips without the figure come last
      return sign * (typeof left === "number" ? left - right : String(left).localeCompare(String(right), "en", { numeric: true }));
    });
  }

  // ---- drawing
  function refresh({ keepPage = false } = {}) {
    if (!keepPage) state.page = 0;
    filter();
    const numPages = Math.max(1, Math.ceil(found.length / state.size));
    state.page = Math.min(state.page, numPages - 1);
    writeAddress();
    drawFacets();
    drawFound();
    drawCards();
    drawPager(numPages);
    drawSelection();
  }

  function drawFacets() {
    const focused = document.activeElement?.id;
    find("facets").replaceChildren(...facets.map(drawFacet));
    if (focused?.startsWith("facet-")) find(focused)?.focus();
    let count = 0;
    for (const values of state.filters.values()) count += values.size;
    find("num-filters").textContent = count ? `(${count})` : "";
  }
  function drawFacet(facet, place) {
    const chosen = state.filters.get(facet.name) ?? new Set();
    const some = facet.values.filter((value, k) => widened.has(facet.name) || k < FEW || chosen.has(value));
    const rows = some.map((value) => h("label", { class: facet.counts.get(value) ? "" : "none" },
      h("input", { type: "checkbox", id: `facet-${place}-${facet.values.indexOf(value)}`, checked: chosen.has(value), onchange: () => flip(facet.name, value) }),
      h("span", { class: "value" }, value === "" ? "(none)" : value), h("span", { class: "number" }, (facet.counts.get(value) ?? 0).toLocaleString("en"))));
    const more = facet.values.length > some.length && h("button", { type: "button", class: "link", onclick: () => { widened.add(facet.name); drawFacets(); } }, `all ${facet.values.length} values`);
    return h("fieldset", {}, h("legend", {}, facet.name === "shape" ? "size" : label(facet.name)), rows, more);
  }
  function flip(name, value) {
    const values = state.filters.get(name) ?? new Set();
    if (!values.delete(value)) values.add(value);
    if (values.size) state.filters.set(name, values);
    else state.filters.delete(name);
    refresh();
  }

  function drawFound() {
    const all = batchGen.meta.numClips.toLocaleString("en");
    const first = state.page * state.size;
    const range = found.length > state.size ? `${first + 1} to ${Math.min(first + state.size, found.length)} of ` : "";
    find("count").textContent = found.length === batchGen.meta.numClips ? `${range}${all} clips` : `${range}${found.length.toLocaleString("en")} found, of ${all} clips`;
    const chips = [];
    if (state.q) chips.push(chip(`"${state.q}"`, () => { state.q = ""; find("search").value = ""; refresh(); }));
    for (const [name, values] of state.filters) for (const value of values) chips.push(chip(`${name === "shape" ? "size" : label(name)}: ${value || "(none)"}`, () => flip(name, value)));
    find("chips").replaceChildren(...chips);
    find("select-found").textContent = `Select ${found.length === 1 ? "this one" : `all ${found.length.toLocaleString("en")}`}`;
    find("select-found").disabled = found.length === 0;
    find("direction").replaceChildren(icon(state.down ? "down" : "up"));
    find("direction").setAttribute("aria-label", state.down ? "Sorted downwards; sort upwards" : "Sorted upwards; sort downwards");
  }
  const chip = (text, remove) => h("button", { type: "button", class: "chip", "aria-label": `Remove filter ${text}`, onclick: remove }, text, h("span", { "aria-hidden": "true" }, " \u00d7"));

  function drawCards() {
    const cards = found.slice(state.page * state.size, (state.page + 1) * state.size).map(card);
    find("cards").replaceChildren(...(cards.length ? cards : [h("li", { class: "empty" }, "No clip matches. Remove a filter, or search for less.")]));
  }
  function card(clip) {
    const id = get("clip_id", clip);
    const status = get("status", clip);
    const box = h("input", { type: "checkbox", "aria-label": `Select ${id}`, onclick: (event) => pick(clip, event.target.checked, event.shiftKey) });
    box.checked = selected.has(clip);
    const frame = batchGen.frame(clip);
    frame.append(h("label", { class: "pick" }, box));
    const length = get("duration_s", clip);
    if (length !== null && status === "committed") frame.append(h("span", { class: "length" }, shown("duration_s", length)));
    const figure = state.sort === "clip_id" || state.sort === "prompt" ? "total_s" : state.sort;
    const facts = [status === "quarantined" ? get("kind", clip) || "quarantined" : status === "pending" ? "pending" : null, `${get("width", clip) ?? "?"} x ${get("height", clip) ?? "?"}`, get("seed", clip) === null ? null : `seed ${get("seed", clip)}`];
    const value = get(figure, clip);
    const element = h("li", { class: `card ${status}${selected.has(clip) ? " selected" : ""}`, "data-clip": clip }, frame,
      h("div", { class: "title" }, h("h2", {}, h("a", { href: batchGen.page(clip) }, id)), value === null || figure === "seed" ? null : h("span", { class: "figure", title: label(figure) }, shown(figure, value))),
      h("p", { class: "prompt", title: get("prompt", clip) }, get("prompt", clip) ?? ""),
      h("p", { class: "facts" }, facts.filter(Boolean).map((fact, k) => h("span", { class: k === 0 && status !== "committed" ? "state" : "" }, fact))));
    return element;
  }

  function drawPager(numPages) {
    const pager = find("pager");
    pager.hidden = numPages === 1;
    const go = (page) => { state.page = page; refresh({ keepPage: true }); find("cards").querySelector("h2 a")?.focus({ preventScroll: true }); scrollTo({ top: 0 }); };
    const near = [...Array(numPages).keys()].filter((page) => page === 0 || page === numPages - 1 || Math.abs(page - state.page) <= 2);
    const buttons = near.flatMap((page, k) => [
      k > 0 && page - near[k - 1] > 1 ? h("span", { class: "soft" }, "\u2026") : null,
      h("button", { type: "button", "aria-label": `Page ${page + 1}`, "aria-current": page === state.page ? "page" : null, onclick: () => go(page) }, String(page + 1)),
    ]);
    pager.replaceChildren(...[
      h("button", { type: "button", "aria-label": "Page back", disabled: state.page === 0, onclick: () => go(state.page - 1) }, icon("back")), ...buttons,
      h("button", { type: "button", "aria-label": "Page on", disabled: state.page === numPages - 1, onclick: () => go(state.page + 1) }, icon("on")),
    ].filter(Boolean));
    pager.go = (step) => { const page = state.page + step; if (page >= 0 && page < numPages) go(page); };
  }

  // ---- selection
  function pick(clip, on, isRange) {
    const range = isRange && anchor !== null ? between(anchor, clip) : [clip];
    for (const each of range) { if (on) selected.add(each); else selected.delete(each); }
    anchor = clip;
    afterSelection();
  }
  function between(a, b) {
    const [first, last] = [found.indexOf(a), found.indexOf(b)].sort((x, y) => x - y);
    return first < 0 ? [b] : found.slice(first, last + 1);
  }
  function afterSelection() {
    keepSelection();
    drawSelection();
    for (const element of find("cards").querySelectorAll(".card")) {
      const on = selected.has(Number(element.dataset.clip));
      element.classList.toggle("selected", on);
      element.querySelector(".pick input").checked = on;
    }
  }
  function drawSelection() {
    find("selection").hidden = selected.size === 0;
    find("selected").textContent = `${selected.size.toLocaleString("en")} selected`;
    document.body.classList.toggle("selecting", selected.size > 0);
  }
  function save() {
    const ids = [...selected].sort((a, b) => a - b).map((clip) => get("clip_id", clip));
    const url = URL.createObjectURL(new Blob([ids.join("\n") + "\n"], { type: "text/plain" }));
    h("a", { href: url, download: `${batchGen.meta.title}-ids.txt` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  // ---- keys
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || find("keys").open) return;
    const isTyping = event.target.matches("input[type=search], select, textarea");
    if (isTyping) { if (event.key === "Escape") event.target.blur(); return; }
    const card = document.activeElement.closest?.(".card");
    const actions = {
      "/": () => find("search").focus(), "?": () => find("keys").showModal(), "[": () => find("pager").go?.(-1), "]": () => find("pager").go?.(1),
      ArrowRight: () => move(card, 1), ArrowLeft: () => move(card, -1), ArrowDown: () => move(card, perRow()), ArrowUp: () => move(card, -perRow()),
      x: card && (() => pick(Number(card.dataset.clip), !selected.has(Number(card.dataset.clip)), false)),
      " ": card && document.activeElement.matches("a") && (() => card.querySelector(".frame").toggle?.()),
    };
    const action = actions[event.key];
    if (!action || (event.key.startsWith("Arrow") && !card && event.target !== document.body)) return;
    event.preventDefault();
    action();
  }
  function perRow() {
    const cards = [...find("cards").querySelectorAll(".card")];
    return Math.max(1, cards.filter((card) => card.offsetTop === cards[0].offsetTop).length);
  }
  function move(card, step) {
    const cards = [...find("cards").querySelectorAll(".card")];
    const place = card ? cards.indexOf(card) + step : 0;
    cards[Math.max(0, Math.min(cards.length - 1, place))]?.querySelector("h2 a").focus();
  }

  // ---- start
  function debounced(work, wait_ms) {
    let timer = 0;
    return () => { clearTimeout(timer); timer = setTimeout(work, wait_ms); };
  }
  function fillControls() {
    const names = SORTS.filter((name) => batchGen.columns[name]);
    find("sort").replaceChildren(...names.map((name) => h("option", { value: name }, label(name))));
    showState();
  }
  function showState() {
    find("search").value = state.q;
    find("sort").value = state.sort;
    find("size").value = String(state.size);
  }
  function listen() {
    find("search").addEventListener("input", debounced(() => { state.q = find("search").value.trim(); refresh(); }, 120));
    find("tools").addEventListener("submit", (event) => event.preventDefault());
    find("sort").addEventListener("change", () => { state.sort = find("sort").value; state.down = state.sort.endsWith("_s") || state.sort.endsWith("bytes"); refresh(); });
    find("direction").addEventListener("click", () => { state.down = !state.down; refresh(); });
    find("size").addEventListener("change", () => { state.size = Number(find("size").value); refresh(); });
    find("select-found").addEventListener("click", () => { for (const clip of found) selected.add(clip); afterSelection(); });
    find("clear").addEventListener("click", () => { selected.clear(); afterSelection(); });
    find("save").addEventListener("click", save);
    find("help").addEventListener("click", () => find("keys").showModal());
    document.addEventListener("keydown", onKey);
    addEventListener("hashchange", () => { readAddress(); showState(); refresh({ keepPage: true }); });
    matchMedia("(min-width: 900px)").addEventListener("change", openFilters);
    openFilters();
  }
  const openFilters = () => { find("filters").open = matchMedia("(min-width: 900px)").matches; };

  function start() {
    readAddress();
    makeFacets();
    makeHaystack();
    fillControls();
    recallSelection();
    listen();
    refresh({ keepPage: true });
    document.body.classList.add("ready");
    performance.mark("batch-gen-ready");
  }
  batchGen.whenLoaded(start);
})();
