// Small charts as SVG, in the colours of the page: a curve with a band, and bars.

import { h, say } from "./dom.js";

const MOST_WIDTH = 640, HEIGHT = 200, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22, NUM_COLOURS = 4;

export function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step + 0);
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

// Curves over versions, one for each of `series`: {label, versions, mean, low, high}. The first one is this run's: `pick(version)` is called
// with its nearest version when somebody clicks.
export function curve(name, series, over, pick) {
  // As many units as pixels, so that numbers keep their size on a telephone.
  const width = Math.min(MOST_WIDTH, document.documentElement.clientWidth - 52);
  const drawn = series.filter((each) => each.mean.some((value) => value !== null));
  const every = drawn.flatMap(({ mean, low, high }) => [...mean, ...(low || []), ...(high || [])]).filter((value) => value !== null);
  if (!every.length) return h("figure", {}, h("figcaption", {}, name), h("p", { class: "soft" }, "No values in this range."));
  const bottom = Math.min(...every), top = Math.max(...every), pad = (top - bottom || Math.abs(top) || 1) * 0.06;
  const first = Math.min(...drawn.map((each) => each.versions[0])), last = Math.max(...drawn.map((each) => each.versions[each.versions.length - 1]));
  const x = scale(first, last, LEFT, width - RIGHT), y = scale(bottom - pad, top + pad, HEIGHT - BOTTOM, TOP);
  const line = (versions, values) => values.map((value, at) => (value === null ? null : `${x(versions[at]).toFixed(1)},${y(value).toFixed(1)}`)).filter(Boolean).join(" ");
  const mark = h("line", { class: "mark", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  const said = "Click a point to open its step.", note = h("p", { class: "note soft" }, said);
  const nearest = (versions, event) => {
    const box = svg.getBoundingClientRect(), wanted = ((event.clientX - box.left) / box.width) * width;
    let best = 0;
    versions.forEach((version, at) => { if (Math.abs(x(version) - wanted) < Math.abs(x(versions[best]) - wanted)) best = at; });
    return best;
  };
  const value = ({ label, versions, mean, low, high }, event) => {
    const at = nearest(versions, event);
    return `${series.length > 1 ? `${label} ` : ""}v${versions[at]}: ${say(mean[at], 5)}${low ? ` (${say(low[at], 5)} to ${say(high[at], 5)})` : ""}`;
  };
  const svg = h("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${name} by version`, class: "curve",
    onpointermove: (event) => {
      const at = x(drawn[0].versions[nearest(drawn[0].versions, event)]);
      mark.setAttribute("x1", at); mark.setAttribute("x2", at);
      note.textContent = drawn.map((each) => value(each, event)).join(" · ");
    },
    onpointerleave: () => { mark.setAttribute("x1", -9); mark.setAttribute("x2", -9); note.textContent = said; },
    onclick: (event) => { if (series[0].versions.length) pick(series[0].versions[nearest(series[0].versions, event)]); },
  },
  ticks(bottom, top, 4).map((each) => [
    h("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(each), y2: y(each) }),
    h("text", { x: LEFT - 6, y: y(each) + 4, "text-anchor": "end" }, tick(each))]),
  ticks(first, last, 6).filter(Number.isInteger).map((each) => h("text", { x: x(each), y: HEIGHT - 6, "text-anchor": "middle" }, tick(each))),
  drawn.map(({ versions, mean, low, high }) => {
    const css = `s${series.findIndex((each) => each.versions === versions) % NUM_COLOURS}`;
    return h("g", { class: css },
      low && h("polyline", { class: "band", points: line(versions, low) }), high && h("polyline", { class: "band", points: line(versions, high) }),
      over > 1 && h("polyline", { class: "raw", points: line(versions, mean) }),
      mean.length < 80 && mean.map((each, at) => each !== null && h("circle", { cx: x(versions[at]), cy: y(each), r: 2.5 })),
      h("polyline", { points: line(versions, over > 1 ? smooth(mean, over) : mean) }));
  }), mark);
  return h("figure", {}, h("figcaption", {}, name, series.length > 1 ? series.map(({ label }, at) => h("span", { class: `key s${at % NUM_COLOURS}` }, label)) : null), svg, note);
}

// Bars with labels; `entries`: [label, count, address or null].
export function bars(entries, title) {
  const most = Math.max(...entries.map((entry) => entry[1]), 1e-12);
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
