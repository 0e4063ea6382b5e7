// Who did what when: a lane for the learner and one for each worker, the colour says the version; broadcasts, and how long rewards took.

import { scale, ticks } from "./charts.js";
import { card, h, link, say, time } from "./dom.js";

const LANE = 22, LABEL = 16, LAGS = 110, AXIS = 20, NUM_COLOURS = 6, LENGTHS = [15, 60, 300, 1800];
const colour = (version) => `v${version % NUM_COLOURS}`;
const clock = (ms) => new Date(ms).toISOString().slice(11, 19);
const go = (address) => () => { location.hash = address; };

function learner(page, x, y) {
  return page.steps.map((step) => {
    const end = step.time_ms, trained = end - step.training_ms, waited = trained - step.idle_ms;
    const part = (from, to, css, said) => {
      const left = Math.max(x.low, x(from)), right = Math.min(x.high, x(to));
      return right > left && h("rect", { x: left, y, width: right - left, height: LANE, class: css }, h("title", {}, said));
    };
    const middle = (Math.max(x.low, x(trained)) + Math.min(x.high, x(end))) / 2;
    return h("g", { class: "go", onclick: go(`#/step/${step.version}`) },
      part(waited, trained, "idle", `waited ${say(step.idle_ms / 1000, 2)} s for the batch of v${step.version}`),
      part(trained, end, `span ${colour(step.version)}`, `trained v${step.version} in ${say(step.training_ms / 1000, 2)} s`),
      x(end) - x(trained) > 34 && middle < x.high - 12 && h("text", { x: middle, y: y + 15, "text-anchor": "middle", class: "in" }, `v${step.version}`));
  });
}

function worker(spans, x, y) {
  return spans.map((span) => {
    const left = Math.max(x.low, x(span.start_ms)), right = Math.min(x.high, x(span.end_ms));
    const said = `group ${span.group}: ${span.num_samples} samples under v${span.version}, ${say((span.end_ms - span.start_ms) / 1000, 2)} s, ${span.fate}${span.step === null ? "" : ` in v${span.step}`}`;
    return h("rect", { x: left, y, width: Math.max(1, right - left), height: LANE, class: `span go ${colour(span.version)} ${span.fate}`, onclick: go(`#/group/${span.group}`) }, h("title", {}, said));
  });
}

// Seconds from a trajectory to its reward: a point for each.
function lags(page, x, top) {
  const names = [...new Set(page.lags.map((each) => each.name))], most = Math.max(...page.lags.map((each) => each.seconds), 0.1);
  const y = scale(0, most, top + LAGS, top + 6);
  return [
    ticks(0, most, 3).map((value) => [h("line", { class: "rule", x1: x.low, x2: x.high, y1: y(value), y2: y(value) }), h("text", { x: x.low + 2, y: y(value) - 2 }, `${say(value, value < 1 ? 2 : 1)} s`)]),
    page.lags.filter((each) => each.time_ms >= page.since_ms && each.time_ms <= page.until_ms).map((each) => h("circle", { cx: x(each.time_ms), cy: y(each.seconds), r: 2, class: `s${names.indexOf(each.name) % 4}` }, h("title", {}, `${each.name}: ${say(each.seconds, 2)} s`))),
  ];
}

function picture(page) {
  const width = Math.min(1200, document.documentElement.clientWidth - 52), rows = 1 + page.lanes.length;
  const x = scale(page.since_ms, page.until_ms, 0, width);
  x.low = 0; x.high = width;
  const at = (row) => row * (LANE + LABEL), bottom = at(rows), lagTop = bottom + LABEL, height = (page.lags.length ? lagTop + LAGS : bottom) + AXIS;
  const wide = width < 500 ? 3 : 8;
  const names = ["learner", ...page.lanes.map((lane) => lane.worker)];
  return h("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "a timeline of learner and workers", class: "timeline" },
    ticks(page.since_ms / 1000, page.until_ms / 1000, wide).map((second) => [
      h("line", { class: "rule", x1: x(second * 1000), x2: x(second * 1000), y1: 0, y2: height - AXIS }),
      h("text", { x: Math.min(width - 26, Math.max(26, x(second * 1000))), y: height - 5, "text-anchor": "middle" }, clock(second * 1000))]),
    names.map((name, row) => h("text", { x: 0, y: at(row) + 12, class: "name" }, name)),
    learner(page, x, at(0) + LABEL), page.lanes.map((lane, row) => worker(lane.spans, x, at(row + 1) + LABEL)),
    page.broadcasts.map((each) => h("g", { class: "go", onclick: go(`#/lineage/${each.version}`) },
      h("line", { class: "broadcast", x1: x(each.time_ms), x2: x(each.time_ms), y1: LABEL, y2: bottom }, h("title", {}, `v${each.version} was published`)),
      h("path", { class: "broadcast", d: `M${x(each.time_ms) - 4},${LABEL - 6} h8 l-4,6 z` }, h("title", {}, `v${each.version} was published`)))),
    page.lags.length ? [h("text", { x: 0, y: lagTop - 3, class: "name" }, "seconds until a reward came"), lags(page, x, lagTop)] : null);
}

export function timeline(page, state) {
  const to = (until) => state.address({ until: Math.round(until), step: null }), length = page.until_ms - page.since_ms;
  const versions = [...new Set(page.lanes.flatMap((lane) => lane.spans.map((span) => span.version)))].sort((a, b) => a - b);
  const rewards = [...new Set(page.lags.map((each) => each.name))];
  const isEmpty = !page.lanes.length && !page.steps.length, isNewest = !state.query.has("until") && !state.query.has("step");
  return {
    title: "Timeline",
    live: isNewest,
    up: "#/",
    previous: page.run_since_ms !== null && page.since_ms > page.run_since_ms - length ? to(page.until_ms - length / 2) : null,
    next: page.run_until_ms !== null && page.until_ms < page.run_until_ms + length / 2 && !isNewest ? to(page.until_ms + length / 2) : null,
    inside: page.steps.length ? `#/step/${page.steps[page.steps.length - 1].version}` : null,
    body: [
      h("h1", {}, "Timeline"),
      h("p", { class: "chips" }, "length: ", LENGTHS.map((each) => h("a", { href: state.address({ seconds: each === 60 ? null : each, until: isNewest || state.query.has("step") ? state.query.get("until") : Math.round(page.until_ms) }), class: each === page.seconds ? "on" : "" }, each < 60 ? `${each} s` : `${each / 60} min`)), isNewest ? null : h("a", { href: state.address({ until: null, step: null }) }, "newest")),
      page.is_cut ? h("p", { class: "answer" }, "More was generated than a picture shows: some of the groups are drawn. A shorter length shows more of them.") : null,
      isEmpty ? h("p", { class: "empty" }, page.run_since_ms === null ? "No step has been trained yet." : ["Nothing happened in this stretch. ", link(to(page.run_until_ms), "To the newest step")])
        : card(null, h("p", { class: "soft" }, `${time(page.since_ms)} to ${clock(page.until_ms)}`), picture(page),
          h("p", { class: "legend" }, versions.slice(-12).map((version) => h("span", { class: `token span ${colour(version)}` }, `v${version}`)), h("span", { class: "token idle" }, "the learner waits"), h("span", { class: "token broadcast" }, "▾ published")),
          rewards.length ? h("p", { class: "legend" }, rewards.map((name, at) => h("span", { class: `key s${at % 4}` }, name))) : null,
          h("p", { class: "soft" }, "A bar of a worker is a group in the colour of its version, pale where it was not trained; a click opens it.")),
    ],
  };
}
