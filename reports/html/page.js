"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const GUTTER = 92, LANE = 24, AXIS = 30, TOP = 4, MS = 1e6;

  // Tables -----------------------------------------------------------------------------------------------------------
  const tsv = (table) => [...table.rows].map((row) => [...row.cells].map((c) => c.textContent.trim()).join("\t")).join("\n");
  const copyText = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const text = tsv(button.closest("figure").querySelector("table"));
      await copyText(text);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }

  // Timelines --------------------------------------------------------------------------------------------------------
  const link = document.getElementById("link");
  const tip = document.getElementById("tip");
  const panels = [...document.querySelectorAll(".lanes")].map((figure) => {
    const run = data.runs[+figure.dataset.run];
    const ends = run.ranks.flatMap((r) => r.t.map((t, i) => t + Math.max(r.d[i], 0)));
    return {
      figure, run, canvas: figure.querySelector("canvas"), rank: 0, hidden: new Set(), hover: null,
      zero: run.view[0], end: ends.reduce((a, b) => Math.max(a, b), 1), view: [...run.view],
    };
  });
  const colours = (printing) => {
    if (printing) return { ink: "#000", muted: "#555", grid: "#ccc", paper: "#fff" };
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    return { ink: of("--ink"), muted: of("--muted"), grid: of("--grid"), paper: of("--paper") };
  };
  const lanesOf = (panel) => panel.run.streams.map((_, i) => i).filter((i) => !panel.hidden.has(i));
  const niceStep = (raw) => {
    const power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw);
  };
  const number = (value, step) => value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const fitted = (context, names, room) => names.find((name) => context.measureText(name).width <= room - 6) || "";

  function draw(panel, printing = false) {
    const { canvas, run, view } = panel;
    const lanes = lanesOf(panel), paint = colours(printing);
    const width = printing ? 1000 : canvas.clientWidth || 1000, height = TOP + lanes.length * LANE + AXIS;
    const density = printing ? 3 : window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
    const g = canvas.getContext("2d");
    g.scale(density, density);
    g.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    g.textBaseline = "middle";
    const scale = (width - GUTTER - 4) / (view[1] - view[0]);
    const x = (t) => GUTTER + (t - view[0]) * scale;
    const bottom = TOP + lanes.length * LANE;

    const step = niceStep(((view[1] - view[0]) / MS) * (95 / (width - GUTTER)));
    g.textAlign = "center";
    for (let at = Math.ceil((view[0] - panel.zero) / MS / step) * step; at * MS + panel.zero <= view[1]; at += step) {
      const place = x(at * MS + panel.zero);
      g.strokeStyle = paint.grid;
      g.beginPath(); g.moveTo(place, TOP); g.lineTo(place, bottom + 4); g.stroke();
      g.fillStyle = paint.muted;
      if (place < width - 60) g.fillText(number(at, step), place, bottom + 12);
    }
    g.textAlign = "right";
    g.fillText("ms", width - 4, bottom + 12);
    lanes.forEach((stream, row) => {
      g.fillStyle = paint.ink;
      g.fillText(run.streams[stream], GUTTER - 8, TOP + row * LANE + LANE / 2);
    });

    const rank = run.ranks[panel.rank], rowOf = new Map(lanes.map((stream, row) => [stream, row]));
    const lit = panel.hover === null ? null : run.b[panel.hover];
    let drawn = 0;
    g.save();
    g.beginPath(); g.rect(GUTTER, 0, width - GUTTER - 4, bottom); g.clip();
    g.textAlign = "center";
    for (let i = 0; i < run.k.length; i++) {
      const row = rowOf.get(run.s[i]), duration = rank.d[i];
      if (row === undefined || duration <= 0) continue;
      const start = rank.t[i], wait = rank.w[i] || 0;
      if (start + duration < view[0] || start > view[1]) continue;
      drawn += 1;
      const kind = data.kinds[run.k[i]], y = TOP + row * LANE + 2, h = LANE - 4;
      g.globalAlpha = lit === null || lit === run.b[i] ? 1 : 0.25;
      if (wait > 0) {
        g.strokeStyle = paint.muted;
        g.setLineDash([2, 2]);
        g.strokeRect(x(start) + 0.5, y + 0.5, Math.max(wait * scale - 1, 0), h - 1);
        g.setLineDash([]);
      }
      const left = x(start + wait), w = Math.max((duration - wait) * scale, 0.75);
      g.fillStyle = kind.fill;
      g.fillRect(left, y, w > 3 ? w - 0.75 : w, h);
      if (w > 12) {
        const batch = run.m[i] < 0 ? `${run.b[i]}` : `${run.b[i]}.${run.m[i]}`;
        const a = Math.max(left, GUTTER), b = Math.min(left + w, width - 4);
        const words = fitted(g, [`${kind.name} ${batch}`, `${kind.short} ${batch}`, batch, run.m[i] < 0 ? "" : `.${run.m[i]}`], b - a);
        g.fillStyle = kind.text;
        if (words) g.fillText(words, (a + b) / 2, y + h / 2 + 0.5);
      }
    }
    g.globalAlpha = 1;
    g.textAlign = "right";
    g.strokeStyle = paint.ink;
    g.setLineDash([4, 3]);
    for (const [, at] of run.steps) {
      if (at < view[0] || at > view[1]) continue;
      g.beginPath(); g.moveTo(x(at), 0); g.lineTo(x(at), bottom); g.stroke();
    }
    g.restore();
    g.fillStyle = paint.muted;
    const room = (run.steps.length > 1 ? run.steps[1][1] - run.steps[0][1] : 0) * scale;
    for (const [batch, at] of run.steps) {
      if (at < view[0] || at > view[1] || room < 70) continue;
      g.fillText(`end of step ${batch}`, x(at), bottom + 24);
    }
    Object.assign(canvas.dataset, { view: view.map(Math.round).join(" "), drawn: String(drawn), rank: String(rank.rank) });
  }

  const drawAll = () => panels.forEach((panel) => draw(panel));
  function show(panel, view) {
    const width = Math.max(view[1] - view[0], 1000);
    const others = link && link.checked ? panels : [panel];
    const offset = view[0] - panel.zero;
    for (const each of others) {
      each.view = [each.zero + offset, each.zero + offset + width];
      draw(each);
    }
  }
  function zoom(panel, factor, at = (panel.view[0] + panel.view[1]) / 2) {
    const [a, b] = panel.view;
    const longest = Math.max(...panels.map((p) => p.end)) * 1.5;
    if ((b - a) * factor > longest && factor > 1) return;
    show(panel, [at - (at - a) * factor, at + (b - at) * factor]);
  }
  function home(whole) {
    const spans = panels.map((p) => (whole ? [-p.zero, p.end - p.zero] : [0, p.run.view[1] - p.zero]));
    const linked = link && link.checked;
    const low = Math.min(...spans.map((s) => s[0])), high = Math.max(...spans.map((s) => s[1]));
    panels.forEach((p, i) => {
      const [a, b] = linked ? [low, high] : spans[i];
      p.view = [p.zero + a, p.zero + b];
    });
    drawAll();
  }
  const timeAt = (panel, event) => {
    const box = panel.canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - GUTTER) / (box.width - GUTTER - 4);
    return panel.view[0] + share * (panel.view[1] - panel.view[0]);
  };
  function opAt(panel, event) {
    const { run, canvas, view } = panel, box = canvas.getBoundingClientRect();
    if (event.clientX - box.left < GUTTER) return null;
    const stream = lanesOf(panel)[Math.floor((event.clientY - box.top - TOP) / LANE)];
    const t = timeAt(panel, event), slack = (2 * (view[1] - view[0])) / box.width;
    const rank = run.ranks[panel.rank];
    let best = null, distance = slack;
    for (let i = 0; i < run.k.length; i++) {
      if (run.s[i] !== stream || rank.d[i] <= 0) continue;
      const gap = Math.max(rank.t[i] - t, t - rank.t[i] - rank.d[i], 0);
      if (gap < distance) { best = i; distance = gap; }
    }
    return best;
  }
  function describe(panel, i) {
    const { run } = panel, rank = run.ranks[panel.rank], wait = rank.w[i] || 0;
    const ms = (ns) => `${(ns / MS).toFixed(3)} ms`;
    const micro = run.m[i] < 0 ? "" : `, micro-batch ${run.m[i]}`;
    const lines = [
      `${data.kinds[run.k[i]].name}, batch ${run.b[i]}${micro}`,
      `rank ${rank.rank}, stream ${run.streams[run.s[i]]}`,
      `starts at ${ms(rank.t[i] - panel.zero)} on this axis, takes ${ms(rank.d[i] - wait)}`,
    ];
    if (wait > 0) lines.push(`after waiting ${ms(wait)} for a peer`);
    return lines.join("\n");
  }
  function point(panel, event) {
    const found = opAt(panel, event);
    if (found !== panel.hover) { panel.hover = found; draw(panel); }
    if (found === null) { tip.style.display = "none"; return; }
    tip.textContent = describe(panel, found);
    tip.style.display = "block";
    const { offsetWidth: w, offsetHeight: h } = tip;
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - w - 8)}px`;
    tip.style.top = `${event.clientY + 18 + h > window.innerHeight ? event.clientY - h - 10 : event.clientY + 18}px`;
  }
  function listen(panel) {
    const { canvas, figure, run } = panel;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(panel, 1.0015 ** event.deltaY, timeAt(panel, event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, view: [...panel.view] };
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("drag");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) { point(panel, event); return; }
      const moved = ((event.clientX - drag.x) * (drag.view[1] - drag.view[0])) / (canvas.clientWidth - GUTTER - 4);
      show(panel, drag.view.map((t) => t - moved));
    });
    const drop = () => { drag = null; canvas.classList.remove("drag"); };
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", drop);
    canvas.addEventListener("pointerleave", () => {
      panel.hover = null;
      tip.style.display = "none";
      draw(panel);
    });
    canvas.addEventListener("keydown", (event) => {
      const width = panel.view[1] - panel.view[0];
      const actions = {
        "+": () => zoom(panel, 0.5), "=": () => zoom(panel, 0.5), "-": () => zoom(panel, 2), 0: () => home(false),
        ArrowLeft: () => show(panel, panel.view.map((t) => t - width / 5)),
        ArrowRight: () => show(panel, panel.view.map((t) => t + width / 5)),
      };
      if (actions[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); actions[event.key](); }
    });
    const select = figure.querySelector(".rank");
    run.ranks.forEach((rank, i) => {
      select.add(new Option(rank.weight > 1 ? `${rank.rank} (stands for ${rank.weight})` : `${rank.rank}`, String(i)));
    });
    select.addEventListener("change", () => { panel.rank = +select.value; panel.hover = null; draw(panel); });
    const box = figure.querySelector(".streams");
    run.streams.forEach((stream, i) => {
      const label = document.createElement("label");
      const input = Object.assign(document.createElement("input"), { type: "checkbox", checked: true, name: stream });
      input.addEventListener("change", () => {
        if (input.checked) panel.hidden.delete(i); else panel.hidden.add(i);
        draw(panel);
      });
      label.append(input, stream);
      box.append(label);
    });
  }
  panels.forEach(listen);
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      const action = button.dataset.zoom;
      if (action === "steps" || action === "all") { home(action === "all"); return; }
      for (const panel of link && link.checked ? panels.slice(0, 1) : panels) zoom(panel, action === "in" ? 0.5 : 2);
    });
  }
  if (link) link.addEventListener("change", () => home(false));
  const used = new Set(data.runs.flatMap((run) => run.k));
  document.getElementById("legend").append(...data.kinds.flatMap((kind, i) => {
    if (!used.has(i)) return [];
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = kind.fill;
    item.append(swatch, kind.name);
    return [item];
  }));
  if (data.runs.some((run) => run.ranks.some((rank) => rank.w.length))) {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.className = "wait";
    item.append(swatch, "waiting for a peer");
    document.getElementById("legend").append(item);
  }

  // Theme, size, print -----------------------------------------------------------------------------------------------
  const darkMedia = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.classList.contains("dark") || (!root.classList.contains("light") && darkMedia.matches);
    root.classList.toggle("dark", !dark);
    root.classList.toggle("light", dark);
    drawAll();
  });
  darkMedia.addEventListener("change", drawAll);
  window.addEventListener("resize", drawAll);
  window.addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details")) {
      if (each.querySelectorAll("tr").length <= 60) each.open = true;  // longer tables stay on the screen
    }
    panels.forEach((panel) => draw(panel, true));
  });
  window.addEventListener("afterprint", drawAll);
  home(false);
})();
