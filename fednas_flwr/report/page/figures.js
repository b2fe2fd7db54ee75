// Draws figures {data, layout}, in the terms of plotly.js, as SVG: lines, markers, bars, heat maps.
// drawFigure(place, figure, look) fills an element; look = {width, size, text, rule, ends} has the
// font's size and the colours of text, lines and of the ends of heat maps.
const drawFigure = (() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  addEventListener("pointermove", show);
  addEventListener("pointerdown", show);
  function show(event) {
    const text = event.target.closest?.("[data-tip]")?.dataset.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    document.body.append(tip);
    const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4);
    tip.style.cssText = `left:${Math.max(4, left)}px;top:${event.clientY + 14}px`;
  }
  function make(parent, name, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }
  const pen = document.createElement("canvas").getContext("2d");
  function widest(texts, size) {
    pen.font = `${size}px ${getComputedStyle(document.body).fontFamily}`;
    return Math.max(0, ...texts.map((text) => pen.measureText(text).width));
  }
  function format(value, spec = "", digits = 5) {
    if (typeof value !== "number") return String(value ?? "");
    const percent = /^\.(\d)%$/.exec(spec), fixed = /^\.(\d)f$/.exec(spec);
    if (percent) return `${(100 * value).toFixed(percent[1])}%`;
    if (fixed) return value.toFixed(fixed[1]);
    if (spec === ",") return value.toLocaleString("en");
    if (value && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e12)) return value.toExponential(1);
    for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(value) >= Math.max(1e4, unit))
        return `${Number((value / unit).toPrecision(digits))} ${name}`;
    return String(Number(value.toPrecision(digits)));
  }
  function told(trace, point) {
    const usual = `${trace.name ? `${trace.name}, ` : ""}%{x}: %{y}`;
    return (trace.hovertemplate ?? usual).replace(/<extra>.*<\/extra>/, "")
      .replace(/%\{(\w+):?([^}]*)\}/g, (_, key, spec) => format(point[key], spec))
      .replaceAll("<br>", "\n");
  }
  // Returns {at, ticks, step} of an axis: places from 0 to 1, and the values that are labelled.
  function scaleOf(axis, values, room) {
    if (axis.type === "category" || values.some((v) => typeof v === "string")) {
      const names = [...new Set(values.map(String))], step = 1 / Math.max(1, names.length);
      const every = Math.ceil(names.length / Math.max(1, room));
      return { step, at: (v) => (names.indexOf(String(v)) + 0.5) * step,
        ticks: names.filter((_, i) => i % every === 0), label: String };
    }
    const numbers = values.filter((v) => typeof v === "number");
    if (axis.type === "log") {
      const logs = numbers.filter((v) => v > 0).map(Math.log10);
      const low = Math.floor(Math.min(...logs)), high = Math.max(low + 1, Math.ceil(Math.max(...logs)));
      const every = Math.ceil((high - low) / Math.max(1, room)), ticks = [];
      for (let e = low; e <= high; e += every) ticks.push(10 ** e);
      return { ticks, at: (v) => (v > 0 ? (Math.log10(v) - low) / (high - low) : NaN),
        label: (v) => format(v) };
    }
    let low = Math.min(...numbers), high = Math.max(...numbers);
    if (axis.range) [low, high] = axis.range;
    else {
      if (axis.rangemode === "tozero") { low = Math.min(0, low); high = Math.max(0, high); }
      if (low === high) { low -= 0.5 * Math.abs(low) || 1; high += 0.5 * Math.abs(high) || 1; }
      const spare = 0.04 * (high - low);
      if (axis.rangemode !== "tozero" || low < 0) low -= spare;
      high += spare;
    }
    const raw = (high - low) / Math.max(1, room), size = 10 ** Math.floor(Math.log10(raw));
    let every = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= raw);
    if (axis.whole) every = Math.max(1, Math.round(every));
    const ticks = [];
    for (let i = Math.ceil(low / every - 1e-9); i * every <= high + 1e-9 * every; i++)
      ticks.push(Number((i * every).toPrecision(12)));
    const largest = Math.max(Math.abs(low), Math.abs(high));  // digits that tell ticks apart
    const digits = Math.min(12, Math.max(5, Math.ceil(Math.log10(largest / every)) + 1));
    const decimals = Math.max(0, Math.ceil(-2 - Math.log10(every) - 1e-9));
    const spec = axis.tickformat === ".0%" ? `.${decimals}%` : axis.tickformat;
    const label = (v) => format(v, spec, digits);
    return { ticks, label, at: (v) => (v - low) / (high - low) };
  }
  function mixed(ends, share) {
    const parts = ends.map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
    return `rgb(${parts[0].map((a, i) => Math.round(a + share * (parts[1][i] - a)))})`;
  }
  return (place, figure, look) => {
    const { data, layout } = figure, { width, size } = look, height = layout.height;
    const heat = data.find((trace) => trace.type === "heatmap");
    const rows = heat && (heat.y ?? heat.z.map((_, i) => i));
    const xs = data.flatMap((trace) => trace.x ?? []);
    const reach = (error, values) => (error?.array ?? []).flatMap((up, i) =>
      up == null || values[i] == null ? [] : [values[i] - (error.arrayminus?.[i] ?? up), values[i] + up]);
    const ys = heat ? rows.map(String) : data.flatMap((trace) => trace.y).concat(
      data.flatMap((trace) => reach(trace.error_y, trace.y)));
    const longest = (texts) => widest(texts, size);
    const named = data.filter((trace) => trace.name);
    const legend = layout.showlegend ?? named.length > 1;
    const whole = !heat && xs.every((v) => Number.isInteger(v));
    let x = scaleOf({ ...layout.xaxis, whole }, heat ? xs.map(String) : xs, width / 70);
    const y = scaleOf(layout.yaxis, ys, heat || layout.yaxis.type ? height / (1.25 * size) : height / 48);
    const left = 10 + longest(y.ticks.map(y.label)) + (layout.yaxis.title?.text ? 1.7 * size : 0);
    const beside = longest(data.flatMap((trace) => (trace.orientation === "h" ? trace.text : [])));
    const ends = heat ? ["cmax", "cmin"].map((key) => layout.coloraxis[key]) : [];
    const short = (v) => format(Number(v.toPrecision(3)));
    const right = heat && width > 420 ? 33 + longest(ends.map(short)) : 12 + beside;
    const inner = Math.max(40, width - left - right);
    const keys = [];  // of the legend: trace, place and row
    for (const trace of legend ? named : []) {
      const last = keys.at(-1), room = 34 + longest([trace.name]);
      const fits = last && last.end + room <= width + 13;
      const at = fits ? last.end : left;
      keys.push({ trace, at, end: at + room, row: (last?.row ?? 0) + (last && !fits ? 1 : 0) });
    }
    const top = legend ? (2.2 + 1.5 * (keys.at(-1)?.row ?? 0)) * size : 0.8 * size;
    const words = longest(x.ticks.map(x.label));
    const slanted = x.step && (layout.xaxis.tickangle || words > inner / x.ticks.length);
    if (slanted) x = scaleOf(layout.xaxis, xs.map(String), inner / (1.3 * size));
    const title = layout.xaxis.title?.text;
    const bottom = (slanted ? Math.min(0.72 * words, 0.4 * height) : size) + 10
      + (title ? 1.5 * size : 0);
    const depth = Math.max(30, height - top - bottom), down = layout.yaxis.autorange === "reversed";
    const px = (v) => left + inner * x.at(heat ? String(v) : v);
    const py = (v) => top + depth * (down ? y.at(heat ? String(v) : v) : 1 - y.at(heat ? String(v) : v));
    const taken = [];  // by names of points: left, top, right, bottom
    const svg = make(document.createElement("div"), "svg", { width, height,
      viewBox: `0 0 ${width} ${height}`, "font-size": size, fill: look.text, role: "presentation" });
    for (const v of x.ticks) {
      const at = px(v), base = top + depth + 4;
      if (layout.xaxis.showgrid !== false)
        make(svg, "line", { x1: at, x2: at, y1: top, y2: top + depth, stroke: look.rule });
      make(svg, "text", slanted
        ? { x: at, y: base + 0.7 * size, "text-anchor": "end",
          transform: `rotate(-40 ${at} ${base + 0.4 * size})` }
        : { x: at, y: base + size, "text-anchor": "middle" }, x.label(v));
    }
    for (const v of y.ticks) {
      const at = py(v);
      if (layout.yaxis.showgrid !== false)
        make(svg, "line", { x1: left, x2: left + inner, y1: at, y2: at, stroke: look.rule });
      make(svg, "text", { x: left - 6, y: at + 0.35 * size, "text-anchor": "end" }, y.label(v));
    }
    if (title)
      make(svg, "text", { x: left + inner / 2, y: height - 4, "text-anchor": "middle" }, title);
    if (layout.yaxis.title?.text)
      make(svg, "text", { x: 0, y: 0, "text-anchor": "middle",
        transform: `translate(${size} ${top + depth / 2}) rotate(-90)` }, layout.yaxis.title.text);
    for (const trace of data) {
      const line = { ...trace.line }, colour = line.color ?? trace.marker?.color ?? "#3b82f6";
      const dashes = { dash: "7 5", dot: "2 4" }[line.dash] ?? "none";
      if (trace.type === "heatmap") {
        const { cmin, cmax } = layout.coloraxis, w = inner / trace.x.length, h = depth / rows.length;
        const room = trace.text && w > 44 && h > size;
        rows.forEach((name, i) => trace.x.forEach((column, j) => {
          const z = trace.z[i][j];
          if (z === null) return;
          const share = cmax > cmin ? Math.min(1, Math.max(0, (z - cmin) / (cmax - cmin))) : 0;
          make(svg, "rect", { x: px(column) - w / 2, y: py(name) - h / 2,
            width: w - (trace.xgap ?? 0), height: h - (trace.ygap ?? 0),
            fill: mixed(look.ends, share), "data-tip": told(trace, { x: column, y: name, z }) });
          if (room && trace.text[i][j])
            make(svg, "text", { x: px(column), y: py(name) + 0.35 * size, "text-anchor": "middle",
              "pointer-events": "none", fill: share > 0.55 ? "#fff" : look.text }, trace.text[i][j]);
        }));
        if (right > 20 && heat) {
          const bar = left + inner + 14, steps = 24;
          for (let i = 0; i < steps; i++)
            make(svg, "rect", { x: bar, y: top + depth * (1 - (i + 1) / steps), width: 12,
              height: depth / steps + 0.5, fill: mixed(look.ends, i / (steps - 1)) });
          for (const [v, at] of [[cmax, top + size], [cmin, top + depth]])
            make(svg, "text", { x: bar + 15, y: at - 2 }, short(v));
        }
        continue;
      }
      const points = trace.x.map((v, i) => ({ x: v, y: trace.y[i], text: trace.text?.[i] ?? "",
        customdata: Array.isArray(trace.customdata) ? trace.customdata[i] : "" }));
      const seen = points.filter((p) => p.y !== null && Number.isFinite(py(p.y)));
      const whisker = (x1, y1, x2, y2) => make(svg, "line", { x1, y1, x2, y2, "pointer-events": "none",
        stroke: trace.type === "bar" ? look.text : colour, "stroke-width": 1.5 });
      const whiskers = () => points.forEach((p, i) => {
        const [x, y] = [trace.error_x, trace.error_y];
        if (x?.array[i] > 0 || x?.arrayminus?.[i] > 0)
          whisker(px(p.x - (x.arrayminus?.[i] ?? x.array[i])), py(p.y), px(p.x + x.array[i]), py(p.y));
        if (y?.array[i] > 0 || y?.arrayminus?.[i] > 0)
          whisker(px(p.x), py(p.y - (y.arrayminus?.[i] ?? y.array[i])), px(p.x), py(p.y + y.array[i]));
      });
      const spoken = trace.hoverinfo === "skip" ? () => ({}) : (p) => ({ "data-tip": told(trace, p) });
      if (trace.type === "bar") {
        const across = trace.orientation === "h", w = 0.72 * (across ? depth * y.step : inner * x.step);
        const [from, to] = across ? [left, left + inner] : [top, top + depth];
        const zero = Math.min(to, Math.max(from, across ? px(0) : py(0)));
        for (const [i, p] of seen.entries()) {
          const end = across ? px(p.x) : py(p.y), fill = trace.marker?.color;
          const start = Math.min(zero, end), length = Math.abs(zero - end);
          make(svg, "rect", { ...(across ? { x: start, y: py(p.y) - w / 2, width: length, height: w }
            : { x: px(p.x) - w / 2, y: start, width: w, height: length }),
            fill: Array.isArray(fill) ? fill[i] : colour, opacity: 0.7, ...spoken(p) });
          if (p.text && across)
            make(svg, "text", { x: left + inner + 6, y: py(p.y) + 0.35 * size }, p.text);
        }
        whiskers();
        continue;
      }
      if (trace.mode.includes("lines")) {
        const path = points.map((p, i) => {
          if (p.y === null || !Number.isFinite(py(p.y))) return "";
          const before = points[i - 1];
          return `${before && before.y !== null ? "L" : "M"}${px(p.x)} ${py(p.y)}`;
        }).join("");
        make(svg, "path", { d: path, fill: "none", stroke: colour, "stroke-dasharray": dashes,
          "stroke-width": line.width ?? 2 });
      }
      const open = trace.marker?.symbol === "circle-open";
      const radius = trace.mode.includes("markers") ? (trace.marker?.size ?? 6) / 2 : 0;
      whiskers();
      for (const p of seen) {
        if (radius)
          make(svg, "circle", { cx: px(p.x), cy: py(p.y), r: radius, stroke: colour,
            "stroke-width": open ? trace.marker.line.width : 0, fill: open ? "none" : colour,
            ...(open || trace.hoverinfo === "skip" ? { "pointer-events": "none" } : {}) });
        if (p.text) {
          const late = px(p.x) > left + 0.7 * inner, wide = longest([p.text]);
          const sides = late ? [-9 - wide, 9] : [9, -9 - wide];
          for (const [dx, dy] of sides.flatMap((dx) => [[dx, -5], [dx, size + 2]])) {
            const [start, base] = [px(p.x) + dx, py(p.y) + dy];
            const box = [start, base - size, start + wide, base];
            if (start < left || box[2] > width || taken.some((b) =>
              box[0] < b[2] && b[0] < box[2] && box[1] < b[3] && b[1] < box[3])) continue;
            taken.push(box);
            make(svg, "text", { x: start, y: base }, p.text);
            break;
          }
        }
        if (trace.hoverinfo !== "skip")
          make(svg, "circle", { cx: px(p.x), cy: py(p.y), r: Math.max(8, radius), fill: "none",
            "pointer-events": "all", ...spoken(p) });
      }
    }
    for (const { trace, at, row } of keys) {
      const colour = trace.line?.color ?? trace.marker?.color ?? "#3b82f6";
      make(svg, "rect", { x: at, y: (0.55 + 1.5 * row) * size, width: 16, height: 3, fill: colour });
      make(svg, "text", { x: at + 21, y: (1 + 1.5 * row) * size }, trace.name);
    }
    place.replaceChildren(svg);
  };
})();
