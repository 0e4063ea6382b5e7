// A trajectory token by token, in the colour of its probability, its advantage or its version.

import { h, say } from "./dom.js";

// As `echoswarm show` has them: probability at least, class.
const PROBABLE = [[0.9, "p4"], [0.5, "p3"], [0.1, "p2"], [0.01, "p1"], [0, "p0"]];
const NUM_VERSION_COLOURS = 6;

export const LEGEND = {
  logprob: PROBABLE.map(([least, css]) => [`≥ ${least}`, css]),
  advantage: [["above 0", "good"], ["below 0", "bad"]],
  version: [],
  none: [],
};

function style(page, place, at, colour) {
  const value = page.tokens.logprobs[at];
  if (value === null) return "given";
  if (colour === "logprob") return PROBABLE.find(([least]) => Math.exp(Math.min(0, value)) >= least)[1];
  if (colour === "advantage" && page.advantage) return page.advantage > 0 ? "good" : "bad";
  if (colour === "version") {
    const span = page.spans.find((each) => each.start <= place && place < each.end);
    return span ? `v${span.version % NUM_VERSION_COLOURS}` : "";
  }
  return "";
}

export function strip(page, colour, ids) {
  const { offset } = page.window, rows = [];
  for (const turn of page.turns) {
    const first = Math.max(turn.start, offset), end = Math.min(turn.end, offset + page.tokens.ids.length);
    if (first >= end) continue;
    const tokens = [];
    for (let place = first; place < end; place += 1) {
      const at = place - offset, id = page.tokens.ids[at], value = page.tokens.logprobs[at];
      const tip = `${place}: id ${id}${value === null ? ", given" : `, log-probability ${value.toFixed(4)}, p ${say(Math.exp(value))}`}`;
      tokens.push(h("span", { class: `token ${style(page, place, at, colour)}`, title: tip }, ids || !page.tokens.texts ? `${id} ` : page.tokens.texts[at]));
    }
    rows.push(h("div", { class: "turn" }, h("div", { class: "soft" }, `${turn.is_generated ? "policy" : "given"} [${turn.start}, ${turn.end})`), h("pre", {}, tokens)));
  }
  return rows;
}
