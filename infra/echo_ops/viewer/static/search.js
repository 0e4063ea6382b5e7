// Search: by text, tokens, range and filters; and questions in SQL.

import { h, link, rewards, say, table } from "./dom.js";
import { fate, missing, place } from "./pages.js";

const FATES = ["", "trained", "dropped", "dead", "evaluated", "probed", "open"];

export function search(page, state) {
  const field = (name, label, hint) => h("label", {}, h("span", {}, label), h("input", { name, value: state.query.get(name) || "", placeholder: hint, autocomplete: "off" }));
  const form = h("form", {
    class: "search",
    onsubmit: (event) => {
      event.preventDefault();
      const values = new URLSearchParams([...new FormData(form)].filter((pair) => pair[1]));
      location.hash = `#/search?${values}`;
    },
  },
  field("pattern", "text", "a regular expression"), field("tokens", "or token ids", "17,4,9"), field("step", "steps", "100..140"), field("version", "or versions", "100..140"),
  field("since", "or since", "2h"), field("until", "until", "2026-11-22T17:05"), field("worker", "worker", "worker-0"), field("task", "task", ""),
  h("label", {}, h("span", {}, "fate"), h("select", { name: "fate" }, FATES.map((name) => h("option", { value: name, selected: name === (state.query.get("fate") || "") }, name || "any")))),
  h("button", {}, "Search"));
  return {
    title: "Search",
    inside: page && page.hits.length ? place(page.hits[0]) : null,
    going: page && !page.is_done ? page.search : null,
    body: [
      h("h1", {}, "Search"), h("p", { class: "soft" }, "A text, tokens, or only a range and filters. ", link("#/sql", "Ask in SQL instead")), form,
      page ? [
        h("p", { role: "status" }, `${say(page.window.total)} found in ${say(page.num_looked_at)} trajectories`, page.is_done ? "." : "; still looking."),
        page.error ? h("p", { class: "alarm" }, page.error) : null, missing(page.missing),
        page.is_done && page.hits.length === 0 ? h("p", { class: "empty" }, "Nothing there fits.") : table(["record", "group", "became", "rewards", "worker", "text"], page.hits.map((hit) => [
          link(place(hit), `${hit.partition}:${hit.offset}`), hit.group ? link(`#/group/${hit.group}`, `${hit.group}/${hit.index}`) : "–", fate(hit), rewards(hit.rewards), hit.worker || "–",
          hit.snippet ? h("code", {}, hit.snippet[0], h("mark", {}, hit.snippet[1]), hit.snippet[2]) : "–"]), "hits"),
      ] : h("p", { class: "soft" }, "One range: steps, versions or times."),
    ],
  };
}

const QUESTIONS = [
  ["fates", "select fate, count(*) as samples, avg(num_generated) as tokens from trajectories group by fate order by samples desc"],
  ["rewards by worker", "select worker_id, name, count(*) as samples, avg(value) as mean from trajectories t join rewards r on t.kafka.partition = r.trajectory.partition and t.kafka.offset = r.trajectory.offset group by all"],
  ["groups without spread", "select step, count(*) as groups from (select step, seq from samples group by step, seq having min(advantage) = max(advantage)) group by step order by step"],
  ["steps", "select step, num_samples, training_s, idle_s from steps order by step desc limit 20"],
  ["drops", "select why, count(*) as drops from drops group by why"],
  ["columns", "describe trajectories"],
];
const RANGES = [["step", "steps", "100..140"], ["version", "or versions", "100..140"], ["since", "or since", "2h"]];

// What a cell leads to, by the name of its column.
function cell(column, value) {
  if (value === null) return h("span", { class: "soft" }, "null");
  if (column === "step" && Number.isInteger(value)) return link(`#/step/${value}`, value);
  if (column === "seq" && Number.isInteger(value)) return link(`#/group/${value}`, value);
  if (column === "group_id") return link(`#/group/${String(value).split("/").pop()}`, value);
  return typeof value === "number" && !Number.isInteger(value) ? say(value, 5) : String(value);
}

export function sql(page, state) {
  const ask = (event) => {
    event.preventDefault();
    const values = new URLSearchParams([...new FormData(form)].filter((pair) => pair[1].trim()));
    location.hash = `#/sql?${values}`;
  };
  const form = h("form", { class: "question", onsubmit: ask },
    h("textarea", { name: "question", rows: 4, spellcheck: "false", "aria-label": "A question in SQL", placeholder: "select … from trajectories, samples, groups, steps, rewards, drops, workers", value: state.query.get("question") || "",
      onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event); } }),
    h("div", { class: "search" }, RANGES.map(([name, label, hint]) => h("label", {}, h("span", {}, label), h("input", { name, value: state.query.get(name) || "", placeholder: hint, autocomplete: "off" }))), h("button", {}, "Ask")));
  return {
    title: "SQL",
    body: [
      h("h1", {}, "SQL"),
      h("p", { class: "soft" }, "One SELECT. Of the log it is about at most 20,000 trajectories: name a range. An export has no such limit (", h("code", {}, "echoswarm view FOLDER"), "). Ctrl+Enter asks. ", link("#/search", "Search for a text instead")),
      h("p", { class: "chips" }, "for example: ", QUESTIONS.map(([label, question]) => h("a", { href: state.address({ question }) }, label))),
      form,
      page && page.error ? h("p", { class: "answer alarm" }, page.error) : null,
      page && page.columns ? [
        missing(page.missing),
        h("p", { role: "status" }, page.rows.length ? `${page.is_cut ? "The first " : ""}${say(page.rows.length)} ${page.rows.length === 1 ? "row" : "rows"}.` : "No row."),
        page.rows.length ? table(page.columns, page.rows.map((row) => row.map((value, at) => cell(page.columns[at], value)))) : null,
      ] : null,
    ],
  };
}
