// Small charts as SVG, in the colours of the page: a curve with a band, and bars.

import { h, say } from "./dom.js";

const MOST_WIDTH = 640, HEIGHT = 200, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22;

function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

const tick = (value) => (Math.abs(value) < 1e-12 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(0) : String(+value.toPrecision(4)));

// The mean of `over` points up to each one; points without a value are left out.
export function smooth(values, over) {
  return values.map((_, at) => {
    const inside = values.slice(Math.max(0, at - over + 1), at + 1).filter((value) => value !== null);
    return inside.length ? inside.reduce((sum, value) => sum + value, 0) / inside.length : null;
  });
}

// A curve over versions. `pick(version)` is called with the nearest version that was clicked.
export function curve(name, versions, { mean, low, high }, over, pick) {
  // As many units as pixels, so that numbers keep their size on a telephone.
  const width = Math.min(MOST_WIDTH, document.documentElement.clientWidth - 52);
  const every = [...mean, ...(low || []), ...(high || [])].filter((value) => value !== null);
  if (!every.length) return h("p", { class: "soft" }, "No values in this range.");
  const bottom = Math.min(...every), top = Math.max(...every), pad = (top - bottom || Math.abs(top) || 1) * 0.06;
  const x = scale(versions[0], versions[versions.length - 1], LEFT, width - RIGHT);
  const y = scale(bottom - pad, top + pad, HEIGHT - BOTTOM, TOP);
  const line = (values) => values.map((value, at) => (value === null ? null : `${x(versions[at]).toFixed(1)},${y(value).toFixed(1)}`)).filter(Boolean).join(" ");
  const mark = h("line", { class: "mark", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  const note = h("p", { class: "note soft" }, "Click a point to open its step.");
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), wanted = ((event.clientX - box.left) / box.width) * width;
    let best = 0;
    versions.forEach((version, at) => { if (Math.abs(x(version) - wanted) < Math.abs(x(versions[best]) - wanted)) best = at; });
    return best;
  };
  const svg = h("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${name} by version`, class: "curve",
    onpointermove: (event) => {
      const at = nearest(event);
      mark.setAttribute("x1", x(versions[at])); mark.setAttribute("x2", x(versions[at]));
      note.textContent = `version ${versions[at]}: ${say(mean[at], 5)}${low ? ` (${say(low[at], 5)} to ${say(high[at], 5)})` : ""}`;
    },
    onclick: (event) => pick(versions[nearest(event)]),
  },
  ticks(bottom, top, 4).map((value) => [
    h("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    h("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, tick(value))]),
  ticks(versions[0], versions[versions.length - 1], 6).filter(Number.isInteger).map((value) =>
    h("text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, tick(value))),
  low && h("polyline", { class: "band", points: line(low) }), high && h("polyline", { class: "band", points: line(high) }),
  over > 1 && h("polyline", { class: "raw", points: line(mean) }),
  mean.length < 80 && mean.map((value, at) => value !== null && h("circle", { cx: x(versions[at]), cy: y(value), r: 2.5 })),
  h("polyline", { points: line(over > 1 ? smooth(mean, over) : mean) }), mark);
  return h("figure", {}, h("figcaption", {}, name), svg, note);
}

// Bars with labels; `entries`: [label, count, address or null].
export function bars(entries, title) {
  const most = Math.max(1, ...entries.map((entry) => entry[1]));
  return h("figure", { class: "bars" }, title && h("figcaption", {}, title), entries.map(([label, count, address]) => {
    const fill = h("i", {});
    fill.style.width = `${(100 * count) / most}%`;
    return h(address ? "a" : "div", { class: "bar", href: address || null }, h("span", {}, label), h("b", {}, fill), h("em", {}, say(count)));
  }));
}

export function histogram(data, title) {
  const entries = data.values
    ? data.values.map((value, at) => [say(value), data.counts[at], null])
    : data.counts.map((count, at) => [`${say(data.edges[at])} to ${say(data.edges[at + 1])}`, count, null]);
  return bars(entries, title);
}
