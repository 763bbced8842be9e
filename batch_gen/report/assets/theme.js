// Runs before the first paint: the theme that was chosen last, else the system's.
"use strict";
(() => {
  const root = document.documentElement;
  const recall = () => { try { return localStorage.getItem("batch-gen-theme"); } catch { return null; } };
  const keep = (theme) => { try { localStorage.setItem("batch-gen-theme", theme); } catch { /* private window */ } };
  const chosen = recall();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = isDark ? "light" : "dark";
      keep(root.dataset.theme);
    });
  });
})();
