// One clip, named by the address: its picture, settings, timings, origin, attempts, and the clips of the same prompt.
"use strict";
(() => {
  const { h, icon, get, shown, label, meta } = batchGen;
  const root = document.getElementById("clip");
  const SETTINGS = ["prompt", "negative_prompt", "seed", "width", "height", "num_frames", "fps", "duration_s", "steps", "guidance_high", "guidance_low", "flow_shift", "preset", "image", "last_image", "priority", "tokens", "truncated"];
  const STAGES = ["queue_wait_s", "text_s", "denoise_s", "decode_s", "encode_s", "verify_s", "upload_s"];
  const MEASURED = ["total_s", "step_p50_s", "step_p95_s", "engine_peak_bytes", "device_peak_bytes", "supervisor_peak_bytes", "started_at", "finished_at"];
  const ORIGIN = ["source", "row", "row_id", "sample", "chunk", "worker", "replica", "attempt", "epoch", "bytes", "sha256", "frames_hash", "request_digest", "fingerprint", "numerics_key"];
  const VARIED = ["sample", "seed", "guidance_high", "guidance_low", "flow_shift", "steps", "width", "height", "num_frames", "fps", "preset"];
  const TEXT = new Set(["message", "worker", "status", "kind"]);
  const MAX_NEIGHBOURS = 60;

  const places = () => new Map(batchGen.columns.clip_id.map((id, clip) => [id, clip]));
  let byId = null;

  function show() {
    byId ??= places();
    let id = location.hash.slice(1);
    try { id = decodeURIComponent(id); } catch { /* shown as it is */ }
    const clip = byId.get(id);
    if (clip === undefined) {
      root.replaceChildren(h("h1", {}, "No such clip"), h("p", {}, `This report has no clip "${id}".`), h("p", {}, h("a", { href: "index.html" }, "To the gallery")));
      return;
    }
    document.title = `${id} - ${meta.title}`;
    batchGen.loadDetails(clip, (details) => draw(clip, details), () => {
      root.replaceChildren(h("h1", {}, id), h("p", { class: "notice" }, "This report was built again meanwhile. ", h("a", { href: location.href, onclick: () => location.reload() }, "Load it anew")));
    });
  }

  function draw(clip, details) {
    const near = neighbours(clip);
    root.replaceChildren(
      head(clip),
      h("div", { class: "stage" }, picture(clip), h("div", { class: "beside" }, verdict(clip), prompt(clip), timings(clip), actions(clip))),
      near.length ? neighbourhood(clip, near) : "",
      h("div", { class: "columns" }, panel("Settings", facts(clip, details, SETTINGS)), tags(details), panel("Measured", facts(clip, details, MEASURED)), panel("Origin", facts(clip, details, ORIGIN)), panel("Run", facts(clip, {}, [], provenance()))),
      attempts(details));
    document.body.classList.add("ready");
  }

  function head(clip) {
    const step = (by, name, picture) => (clip + by >= 0 && clip + by < meta.numClips ? h("a", { href: batchGen.page(clip + by), class: "icon", "aria-label": `${name}: ${get("clip_id", clip + by)}`, rel: by < 0 ? "prev" : "next" }, icon(picture)) : null);
    return h("div", { class: "head" }, h("h1", {}, get("clip_id", clip)), h("nav", { "aria-label": "Clips beside" }, step(-1, "Clip before", "back"), step(1, "Clip after", "on")));
  }

  function picture(clip) {
    if (get("status", clip) !== "committed") return h("div", { class: "frame" }, h("p", { class: `words ${get("status", clip)}` }, get("status", clip)));
    if (!batchGen.file(clip)) return batchGen.frame(clip);
    const player = batchGen.video(clip, { controls: true, style: `aspect-ratio: ${get("width", clip)} / ${get("height", clip)}` });
    const box = h("div", { class: "picture" }, player);
    player.addEventListener("error", () => {
      box.replaceChildren(batchGen.frame(clip), h("p", { class: "soft" }, "This browser cannot play the file, or it is not where the report expects it. Above is its poster."));
    });
    return box;
  }

  function verdict(clip) {
    const status = get("status", clip);
    if (status === "pending") return h("p", { class: "verdict pending" }, "Waiting: no verdict when this report was built.");
    if (status === "committed") return h("p", { class: "verdict committed" }, `Committed${get("flags", clip) ? `, flagged ${get("flags", clip)}` : ""}`);
    return h("div", { class: "verdict quarantined" }, h("p", {}, "Quarantined: ", h("b", {}, get("kind", clip) ?? "unknown"), get("class", clip) ? ` (class ${get("class", clip)})` : ""), h("pre", {}, batchGen.message(clip)));
  }
  const prompt = (clip) => h("p", { class: "prompt" }, get("prompt", clip) ?? "");

  function timings(clip) {
    const timed = STAGES.map((name) => [name, get(name, clip)]).filter(([, value]) => value !== null && value > 0);
    if (!timed.length) return null;
    const longest = Math.max(...timed.map(([, value]) => value));
    const rows = timed.map(([name, value]) => h("div", { class: value === longest ? "row longest" : "row" }, h("dt", {}, label(name).replace(" time", "")), h("dd", {}, h("span", { class: "meter", style: `width: ${(100 * value) / longest}%` }), h("span", {}, shown(name, value)))));
    return h("div", { class: "timings" }, h("h2", {}, "Stages"), h("dl", {}, rows));
  }

  function actions(clip) {
    const file = batchGen.file(clip);
    const id = get("clip_id", clip);
    const command = get("status", clip) === "quarantined" ? `batch-gen retry ${meta.url} --ids ids.txt` : `batch-gen status ${meta.url} ${id}`;
    return h("p", { class: "actions" }, file && get("status", clip) === "committed" ? h("a", { href: file, class: "button" }, "Open the file") : null, h("a", { href: "index.html", class: "button" }, "Gallery"), h("code", {}, command));
  }

  function facts(clip, details, names, more = []) {
    const value = (name) => (details[name] !== undefined ? details[name] : get(name, clip));
    const rows = [...names.map((name) => [label(name), shown(name, value(name))]), ...more].filter(([, text]) => text !== "");
    return rows.length ? h("dl", { class: "facts" }, rows.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])) : null;
  }
  function provenance() {
    const settings = Object.entries(meta.settings).filter(([name]) => name !== "preset").map(([name, value]) => [name.replaceAll("_", " "), typeof value === "object" ? JSON.stringify(value) : String(value)]);
    return [...settings, ...Object.entries(meta.versions).map(([name, value]) => [name, String(value)])];
  }
  const panel = (title, content) => (content ? h("section", { class: "panel" }, h("h2", {}, title), content) : null);
  function tags(details) {
    const rows = Object.entries(details.extra ?? {}).filter(([, value]) => value !== null);
    return rows.length ? panel("Columns of the manifest", h("dl", { class: "facts" }, rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))) : null;
  }

  function attempts(details) {
    const tally = Object.entries(details.tally ?? {}).filter(([, value]) => value);
    if (!details.attempts.length && !tally.length) return null;
    const names = ["attempt", "epoch", "status", "kind", "message", "worker", "chunk", "total_s", "started_at", "finished_at", "failed_at"].filter((name) => details.attempts.some((row) => row[name] !== undefined));
    const rows = details.attempts.map((row) => h("tr", {}, names.map((name) => h("td", { class: TEXT.has(name) ? "text" : "" }, shown(name, row[name])))));
    const counted = tally.map(([name, value]) => `${name.replaceAll("_", " ")} ${value === true ? "" : value}`.trim()).join(", ");
    const table = rows.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col", class: TEXT.has(name) ? "text" : "" }, label(name))))), h("tbody", {}, rows))) : null;
    return panel("Attempts", h("div", {}, counted ? h("p", { class: "soft" }, `Counted by its chunk: ${counted}.`) : null, table));
  }

  // ---- clips of the same prompt: samples and sweep values side by side
  function neighbours(clip) {
    const prompt = get("prompt", clip);
    if (!prompt) return [];
    const same = [];
    for (let other = 0; other < meta.numClips; other++) if (get("prompt", other) === prompt) same.push(other);
    return same.length > 1 ? same : [];
  }
  function neighbourhood(clip, near) {
    const varied = VARIED.filter((name) => new Set(near.map((other) => get(name, other))).size > 1).slice(0, 4);
    const order = varied.filter((name) => name !== "sample" && name !== "seed");
    near.sort((a, b) => { for (const name of order) { const by = (get(name, a) ?? 0) - (get(name, b) ?? 0); if (by) return by; } return a - b; });
    const some = near.slice(0, MAX_NEIGHBOURS);
    if (!some.includes(clip)) some.unshift(clip);
    const frames = [];
    const cards = some.map((other) => {
      const frame = batchGen.frame(other);
      frames.push(frame);
      const values = varied.map((name) => h("span", {}, `${label(name)} `, h("b", {}, shown(name, get(name, other)) || "none")));
      return h("li", { class: `card ${get("status", other)}${other === clip ? " current" : ""}` }, frame, h("h3", {}, h("a", { href: batchGen.page(other), "aria-current": other === clip ? "page" : null }, get("clip_id", other))), h("p", { class: "facts varied" }, values));
    });
    const play = h("button", { type: "button", "aria-pressed": "false", onclick: () => {
      const on = play.getAttribute("aria-pressed") === "false";
      for (const frame of frames) (on ? frame.playFromStart : frame.stop)?.();
      play.setAttribute("aria-pressed", String(on));
      play.textContent = on ? "Stop all" : "Play all together";
    } }, "Play all together");
    const rest = near.length > some.length ? h("p", {}, h("a", { href: `index.html#q=${encodeURIComponent(get("prompt", clip))}` }, `All ${near.length} in the gallery`)) : null;
    return h("section", { class: "panel near" }, h("h2", {}, "Same prompt ", h("span", {}, `${near.length} clips${varied.length ? `, by ${varied.map(label).join(", ")}` : ""}`), play), h("ul", { class: "cards small" }, cards), rest);
  }

  addEventListener("hashchange", () => { show(); scrollTo({ top: 0 }); });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("video, input, button, select")) return;
    const link = root.querySelector(event.key === "ArrowLeft" ? "a[rel=prev]" : event.key === "ArrowRight" ? "a[rel=next]" : "none");
    if (link) { event.preventDefault(); location.hash = link.hash; }
  });
  batchGen.whenLoaded(show);
})();
