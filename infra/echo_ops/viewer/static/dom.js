// Elements from data. Texts become text nodes and nothing else: what a policy wrote is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_NAMES = new Set(["svg", "g", "line", "path", "polyline", "rect", "circle", "text", "title"]);

export function h(name, attributes, ...children) {
  const inSvg = SVG_NAMES.has(name);
  const element = inSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "value") element.value = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

export function link(address, ...children) {
  return h("a", { href: address }, ...children);
}

// Numbers as a person reads them: 0.25, 12, 3,000, 2.1e-5; a dash where there is none.
export function say(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return size >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);
}

export function time(ms) {
  return ms ? new Date(ms).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "–";
}

export function ago(seconds) {
  for (const [least, unit] of [[86400, "days"], [3600, "hours"], [60, "minutes"]]) if (seconds >= 2 * least) return `${Math.round(seconds / least)} ${unit}`;
  return `${Math.round(seconds)} s`;
}

export function rewards(values) {
  const names = Object.keys(values || {});
  return names.length ? names.map((name) => `${name} ${say(values[name])}`).join(" · ") : "no reward";
}

export function table(heads, rows, css = "") {
  return h("div", { class: `scroll ${css}` }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", {}, head)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell)))))));
}

export function card(title, ...children) {
  return h("section", { class: "card" }, title && h("h2", {}, title), ...children);
}

export function facts(pairs) {
  return h("dl", {}, pairs.filter((pair) => pair[1] !== null && pair[1] !== undefined && pair[1] !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

// Links to the windows before and after this one.
export function pager(state, window) {
  const { offset, limit, total } = window;
  const to = (at) => state.address({ offset: at || null });
  return total > limit || offset > 0
    ? h("p", { class: "pager" },
      offset > 0 && link(to(Math.max(0, offset - limit)), "‹ back"),
      ` ${Math.min(offset + 1, total)} to ${Math.min(offset + limit, total)} of ${say(total)} `,
      offset + limit < total && link(to(offset + limit), "more ›"))
    : null;
}
