// Data and building blocks of all pages. Text of users enters the page as text nodes and attributes alone.
"use strict";
const batchGen = (() => {
  const meta = JSON.parse(document.getElementById("meta").textContent);
  const columns = {};
  const listeners = [];
  const details = {};
  let numLoaded = 0;

  // A block of the clips' table; see `packed` in clips.py for the three forms of a column.
  function addClips(start, count, packed) {
    for (const [name, cells] of Object.entries(packed)) {
      const column = (columns[name] ??= new Array(meta.numClips).fill(null));
      for (let k = 0; k < count; k++) {
        column[start + k] = "all" in cells ? cells.all : "places" in cells ? cells.values[cells.places[k]] : cells[k];
      }
    }
    numLoaded += count;
    if (numLoaded === meta.numClips) listeners.splice(0).forEach((listener) => listener());
  }

  function addDetails(start, bodies) { bodies.forEach((body, k) => { details[start + k] = body; }); }

  // Details of one clip: a script tag, because pages from disk may not fetch.
  function loadDetails(clip, done, failed) {
    if (details[clip]) { done(details[clip]); return; }
    const script = document.createElement("script");
    script.src = meta.details[Math.floor(clip / meta.chunkClips)];
    script.onload = () => (details[clip] ? done(details[clip]) : failed());
    script.onerror = failed;
    document.head.append(script);
  }

  const whenLoaded = (listener) => (numLoaded === meta.numClips ? listener() : listeners.push(listener));
  const get = (name, clip) => columns[name]?.[clip] ?? null;
  const extraNames = () => Object.keys(columns).filter((name) => name.startsWith("extra."));

  // h("p", {class: "soft"}, "text", child): properties that start with "on" are listeners, the rest attributes.
  function h(tag, properties, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties ?? {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  }

  const ICONS = {
    play: "M4 2.5v11l9-5.5z", stop: "M3 3h10v10H3z", up: "M8 3v10M3.5 7.5 8 3l4.5 4.5", down: "M8 13V3M3.5 8.5 8 13l4.5-4.5",
    back: "M10 3 5 8l5 5", on: "M6 3l5 5-5 5",
  };
  function icon(name) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 16 16");
    svg.setAttribute("aria-hidden", "true");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", ICONS[name]);
    if (name === "play" || name === "stop") path.setAttribute("class", "fill");
    svg.append(path);
    return svg;
  }

  const plain = (value, digits = 3) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits))));
  function seconds(value) {
    if (value < 600) return `${plain(value)} s`;
    const whole = Math.round(value);
    const two = (number) => String(number).padStart(2, "0");
    return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  }
  function bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    const place = Math.min(units.length - 1, value < 1 ? 0 : Math.floor(Math.log10(value) / 3));
    return `${plain(value / 1000 ** place)} ${units[place]}`;
  }
  const moment = (value) => `${new Date(value * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;

  // A cell for people, by the unit in its column's name.
  function shown(name, value) {
    if (value === null || value === undefined || value === "") return "";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return String(value);
    if (name.endsWith("_at")) return moment(value);
    if (name.endsWith("_s")) return seconds(value);
    if (name.endsWith("bytes")) return bytes(value);
    return name === "seed" || Number.isInteger(value) ? String(value) : plain(value, 6);
  }

  const LABELS = {
    clip_id: "id", class: "failure class", kind: "failure kind", num_frames: "frames", fps: "frames per second", bytes: "file size",
    duration_s: "length", total_s: "total time", step_p50_s: "step (median)", step_p95_s: "step (95 %)", engine_peak_bytes: "engine memory (peak)",
    device_peak_bytes: "device memory (peak)", supervisor_peak_bytes: "supervisor memory (peak)", finished_at: "time of finish", started_at: "start",
    queue_wait_s: "queue wait", row: "manifest row", source: "manifest",
  };
  function label(name) {
    if (name.startsWith("extra.")) return name.slice("extra.".length);
    return LABELS[name] ?? name.replace(/_s$/, name.includes("_") ? " time" : "").replaceAll("_", " ");
  }

  const page = (clip) => `clip.html#${encodeURIComponent(get("clip_id", clip))}`;
  // The clip's file, null when there is none or no browser can reach it.
  function file(clip) {
    const key = get("key", clip);
    if (!key || meta.rootUrl === null) return null;
    return meta.rootUrl + key.split("/").map(encodeURIComponent).join("/");
  }
  const shape = (clip) => `${get("width", clip) ?? 16} / ${get("height", clip) ?? 9}`;
  const alt = (clip) => `Frame of clip ${get("clip_id", clip)}: ${(get("prompt", clip) ?? "").slice(0, 200)}`;

  function video(clip, properties) {
    const element = h("video", { playsinline: true, loop: true, preload: "metadata", poster: get("poster", clip), "aria-label": alt(clip), ...properties });
    element.muted = true;
    element.src = file(clip);
    return element;
  }

  // What stands for a clip before it plays: its poster, else its first frame once it is in view, else words.
  const arrivals = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      arrivals.unobserve(entry.target);
      const clip = Number(entry.target.dataset.clip);
      const still = video(clip, { class: "still", tabindex: -1, poster: null });
      still.addEventListener("error", () => still.replaceWith(words(clip)));
      entry.target.replaceWith(still);
    }
  }, { rootMargin: "300px" });
  const message = (clip) => (get("message", clip) ?? "").replace(`clip ${get("clip_id", clip)}: `, "");
  function words(clip) {
    const status = get("status", clip);
    const text = status === "quarantined" ? message(clip) || get("kind", clip) : status === "pending" ? "pending" : "no picture";
    return h("p", { class: `words ${status}` }, text);
  }
  function still(clip) {
    if (get("poster", clip)) {
      return h("img", { class: "still", src: get("poster", clip), alt: alt(clip), loading: "lazy", decoding: "async", onerror: (event) => event.target.replaceWith(words(clip)) });
    }
    if (get("status", clip) !== "committed" || !file(clip)) return words(clip);
    const place = h("p", { class: "words", "data-clip": clip }, "");
    arrivals.observe(place);
    return place;
  }

  // A frame that plays on hover, click and key; `playing` holds it until it is stopped.
  function frame(clip, properties) {
    const box = h("div", { class: "frame", style: `aspect-ratio: ${shape(clip)}`, ...properties }, still(clip));
    if (!file(clip)) return box;
    let player = null;
    let sticky = false;
    let timer = 0;
    const button = h("button", { type: "button", class: "play", "aria-label": `Play ${get("clip_id", clip)}`, "aria-pressed": "false" }, icon("play"));
    const mark = () => {
      button.replaceChildren(icon(sticky ? "stop" : "play"));
      button.setAttribute("aria-pressed", String(sticky));
      box.classList.toggle("playing", player !== null);
    };
    const start = () => {
      if (player) return;
      player = video(clip, { class: "player", preload: "auto", autoplay: true, tabindex: -1 });
      player.addEventListener("error", () => { stop(); box.classList.add("unplayable"); box.title = "This browser cannot play this clip"; });
      box.append(player);
      player.play().catch(() => {});
      mark();
    };
    const stop = () => {
      clearTimeout(timer);
      sticky = false;
      if (player) { player.pause(); player.remove(); player.removeAttribute("src"); player.load(); player = null; }
      mark();
    };
    box.toggle = () => { if (sticky) { stop(); } else { start(); sticky = true; mark(); } };
    box.playFromStart = () => { start(); sticky = true; player.currentTime = 0; mark(); };
    box.stop = stop;
    box.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") timer = setTimeout(start, 150); });
    box.addEventListener("pointerleave", () => { clearTimeout(timer); if (!sticky) stop(); });
    box.addEventListener("click", (event) => { if (!event.target.closest(".pick")) box.toggle(); });
    box.append(button);
    return box;
  }

  return { meta, columns, addClips, addDetails, loadDetails, whenLoaded, get, extraNames, h, icon, shown, label, page, file, frame, message, video };
})();
