// The pages: each takes what the server says and gives elements. `state` is the address: path, query, `address(changes)`.

import { bars, curve, histogram } from "./charts.js";
import { ago, card, facts, h, link, pager, rewards, say, table, time } from "./dom.js";
import { frames } from "./drawings.js";
import { LEGEND, strip } from "./tokens.js";

export const place = (each) => `#/trajectory/${each.partition}:${each.offset}`;
export const fate = (each) => h("span", { class: `fate ${each.became.split(/[ :]/)[0]}` }, each.became);
const ages = (counts) => (counts || []).map((count, age) => [`${age}`, count, null]);
export const missing = (sentences) => (sentences || []).map((sentence) => h("p", { class: "alarm" }, sentence));

function stepRows(steps) {
  return table(["version", "rewards", "samples", "staleness", "waited", "trained", "time"], steps.map((step) => [
    link(`#/step/${step.version}`, `v${step.version}`),
    step.rewards.map((each) => `${each.name} ${say(each.mean)}`).join(" · "),
    say(step.num_samples), `${say(step.staleness_mean, 2)}, most ${say(step.staleness_max)}`,
    `${say(step.idle_s, 2)} s`, `${say(step.training_s, 2)} s`, time(step.time_ms)]));
}

export function overview(page, state, curves, steps) {
  return {
    title: page.run,
    inside: curves.versions.length ? `#/step/${page.version}` : null,
    live: true,
    body: [
      h("h1", {}, page.run), h("p", { class: "soft" }, [page.task, page.model, page.mode].filter(Boolean).join(" · ")),
      page.troubles.map((each) => h("p", { class: "answer alarm" }, each)),
      page.ended_s !== null ? h("p", { class: "answer" }, `The run has ended, or was stopped: the learner was last heard of ${ago(page.ended_s)} ago, and its workers are gone.`)
        : page.troubles.length ? null : h("p", { class: "answer fine" }, "Learner and workers are at work."),
      h("p", { class: "answer" }, page.limit),
      h("div", { class: "numbers" }, [
        [link(`#/step/${page.version}`, `v${page.version}`), "newest step"],
        [page.published === null ? "–" : `v${page.published}`, "newest published"],
        ...Object.entries(page.rewards).map(([name, value]) => [say(value), `${name}, last ten steps`]),
        [`${say(page.s_per_step, 2)} s`, "a step"], [say(page.samples_per_s, 1), "samples trained a second"],
        [say(page.staleness_mean, 2), "mean staleness"], [say(page.num_trained), "samples trained"],
        [link("#/dropped", say(page.num_dropped)), "dropped"],
        ...(page.cost ? [[link("#/pool", say(page.cost, 2)), "cost so far"], [say(page.cost_per_1000, 2), "cost of 1,000 samples, last ten steps"]] : []),
      ].map(([value, label]) => h("div", { class: "number" }, h("b", {}, value), h("span", {}, label)))),
      curves.versions.length ? card("Rewards", h("div", { class: "grid" }, drawn(curves, 10))) : card("Rewards", h("p", { class: "empty" }, "No step has been trained yet: curves begin with the first.")),
      steps.steps.length ? card("Newest steps", stepRows(steps.steps), link("#/steps", "all steps")) : null,
      card("Workers", page.workers.length === 0 ? h("p", { class: "empty" }, "No worker has said anything yet.") : table(["worker", "kind", "engine", "state", "version", "samples/s", "in flight", "samples", "last heard"], page.workers.map((each) => [
        link(`#/search?worker=${encodeURIComponent(each.worker)}`, each.worker), each.kind || "–", each.engine, each.state, each.version === null ? "–" : `v${each.version}`,
        say(each.rollouts_per_s, 1), say(each.in_flight), say(each.rollouts), `${ago(each.silent_s)} ago`])), link("#/pool", "the pool")),
      page.notes.length ? card("What the books do not know", page.notes.map((note) => h("p", {}, note))) : null,
    ],
  };
}

function drawn(page, over) {
  const open = (version) => { location.hash = `#/step/${version}`; };
  const others = Object.entries(page.others || {});
  return Object.entries(page.curves).map(([name, values]) => curve(name, [
    { label: page.run, versions: page.versions, ...values },
    ...others.filter(([, other]) => other.curves[name]).map(([label, other]) => ({ label, versions: other.versions, ...other.curves[name] })),
  ], over, open));
}

// The runs of the namespace: each may be drawn over this one.
function runChips(page, state) {
  const shown = Object.keys(page.others);
  const said = (each) => (each.parent_run ? `${each.run} (forked from ${each.parent_run} v${each.parent_version})` : each.run);
  return page.runs.length > 1 ? h("p", { class: "chips" }, "beside it: ", page.runs.filter((each) => each.run !== page.run).map((each) =>
    h("a", { href: state.address({ run: shown.includes(each.run) ? shown.filter((name) => name !== each.run) : [...shown, each.run] }), class: shown.includes(each.run) ? "on" : "" }, said(each)))) : null;
}

export function metrics(page, state) {
  const chosen = Object.keys(page.curves), over = Number(state.query.get("smooth") || 1);
  const toggled = (name) => state.address({ name: chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name] });
  return {
    title: "Metrics",
    live: true,
    inside: page.versions.length ? `#/step/${page.versions[page.versions.length - 1]}` : null,
    body: [
      h("h1", {}, "Metrics"),
      h("p", { class: "chips" }, "smoothing: ", [1, 5, 10, 50].map((each) => h("a", { href: state.address({ smooth: each === 1 ? null : each }), class: each === over ? "on" : "" }, each === 1 ? "none" : `mean of ${each}`))),
      runChips(page, state),
      page.steps_a_point > 1 ? h("p", { class: "soft" }, `${page.steps_a_point} steps a point: the line is their mean, the thin lines the least and the most. ?first= and ?last= narrow the range.`) : null,
      page.unknown.length ? h("p", { class: "alarm" }, `No step states ${page.unknown.join(", ")}.`) : null,
      chosen.length ? h("div", { class: "grid" }, drawn(page, over).map((each) => card(null, each))) : h("p", { class: "empty" }, page.names.length ? "No number is chosen: take some below." : "No step has been trained yet: curves begin with the first."),
      page.names.length ? card("All numbers of a step", h("p", { class: "chips" }, page.names.map((name) => h("a", { href: toggled(name), class: chosen.includes(name) ? "on" : "" }, name)))) : null,
    ],
  };
}

export function steps(page, state) {
  return { title: "Steps", live: true, inside: page.steps.length ? `#/step/${page.steps[0].version}` : null, body: [h("h1", {}, "Steps"), page.steps.length ? [pager(state, page.window), stepRows(page.steps), pager(state, page.window)] : h("p", { class: "empty" }, "No step has been trained yet.")] };
}

export function step(page, state) {
  const sort = state.query.get("sort") || "spread";
  const sorts = { spread: "largest spread", reward: "lowest reward", "-reward": "highest reward", batch: "order of the batch" };
  return {
    title: `Step ${page.version}`,
    previous: page.previous && `#/step/${page.previous}`,
    next: page.next && `#/step/${page.next}`,
    up: "#/metrics",
    inside: page.groups.length ? `#/group/${page.groups[0].seq}` : null,
    body: [
      h("h1", {}, `Step ${page.version}`),
      h("p", { class: "soft" }, `${time(page.time_ms)} · ${say(page.num_samples)} samples · waited ${say(page.idle_s, 2)} s, trained ${say(page.training_s, 2)} s · `, link(`#/timeline?step=${page.version}`, "timeline"), " · ", link(`#/lineage/${page.version}`, "lineage")),
      page.missing ? h("p", { class: "alarm" }, `The batch is gone: ${page.missing}.`) : null,
      h("div", { class: "grid" },
        Object.entries(page.histograms).map(([name, data]) => card(`Reward ${name}`, histogram(data), page.defaulted[name] ? h("p", { class: "soft" }, `${page.defaulted[name]} are the default`) : null)),
        card("Staleness", bars(ages(page.staleness.total), "samples by age in versions"))),
      card("Groups", h("p", { class: "chips" }, Object.entries(sorts).map(([name, label]) => h("a", { href: state.address({ sort: name === "spread" ? null : name, offset: null }), class: name === sort ? "on" : "" }, label))),
        page.num_without_spread !== undefined ? h("p", { class: "soft" }, `${page.num_without_spread} of ${page.window.total} groups have no spread: they teach nothing.`) : null,
        pager(state, page.window),
        table(["group", "mean", "spread", "samples", "advantages", "rewards"], page.groups.map((group) => [
          link(`#/group/${group.seq}`, `${group.seq}`), say(group.mean), say(group.spread), say(group.num_samples),
          `${say(group.advantage_least)} to ${say(group.advantage_most)}`, group.values.map((value) => say(value, 2)).join(" ")])),
        pager(state, page.window)),
      h("div", { class: "grid" },
        card("Workers", bars(page.workers.map((each) => [each.worker, each.staleness.reduce((sum, count) => sum + count, 0), `#/search?worker=${encodeURIComponent(each.worker)}&step=${page.version}`]))),
        card("Numbers", facts(Object.entries(page.metrics).map(([name, value]) => [link(`#/metrics?name=${encodeURIComponent(name)}`, name), say(value, 5)])))),
      card("Where it is", facts([["checkpoint", page.checkpoint], ["parent", page.parent], ["session", page.session], ["reward weights", page.reward_terms.map((term) => `${term.name} × ${term.weight}`).join(", ")]])),
    ],
  };
}

export function group(page, state) {
  const kind = page.group.includes("-") ? page.group.replace(/\d+$/, "") : "", seq = Number(page.group.replace(/^\D*/, ""));
  const near = (found, other) => (found !== null ? `#/group/${found}` : page.step === null && other >= 0 ? `#/group/${kind}${other}` : null);
  return {
    title: `Group ${page.group}`,
    previous: near(page.previous, seq - 1),
    next: near(page.next, seq + 1),
    up: page.step === null ? "#/steps" : `#/step/${page.step}`,
    inside: page.samples.length ? place(page.samples[0]) : null,
    body: [
      h("h1", {}, `Group ${page.group}`),
      h("p", { class: "soft" }, [page.task, page.purpose, `${page.window.total} samples`].filter(Boolean).join(" · "), page.step !== null ? [" · trained in ", link(`#/step/${page.step}`, `v${page.step}`)] : null),
      missing(page.missing),
      page.prompt && card("Prompt", h("pre", {}, page.prompt.text, page.prompt.is_cut ? " …" : "")),
      pager(state, page.window),
      h("div", { class: "grid samples" }, page.samples.map((each) => h("section", { class: "card" },
        h("h2", {}, link(place(each), each.is_readable ? `sample ${each.index}` : `${each.partition}:${each.offset}`), " ", fate(each)),
        h("p", {}, h("b", {}, rewards(each.rewards)), each.advantage !== null ? h("span", { class: each.advantage > 0 ? "good" : each.advantage < 0 ? "bad" : "" }, ` advantage ${say(each.advantage)}`) : null),
        each.drop && each.drop.detail ? h("p", { class: "soft" }, each.drop.detail) : null,
        each.answer ? h("pre", {}, each.answer.text, each.answer.is_cut ? " …" : "") : h("p", {}, "Nobody can read this record."),
        each.is_readable ? h("p", { class: "soft" }, `${versions(each)} · ${each.worker} · ${each.num_generated} tokens, mean log-probability ${say(each.mean_logprob)}`) : null))),
      pager(state, page.window),
      late(state),
    ],
  };
}

// Of the learner's log-probabilities the log has what the step states, not each token's.
function learner(page) {
  const names = Object.keys(page.learner || {});
  return card("Learner and sampler", names.length
    ? [facts(names.map((name) => [link(`#/metrics?name=${encodeURIComponent(name)}`, name), say(page.learner[name], 5)])), h("p", { class: "soft" }, `Of all tokens of step ${page.step}: the log has the sampler's log-probability of each token, and of the learner's what a step states.`)]
    : h("p", { class: "soft" }, page.step === null ? "No step trained it, so the learner's log-probabilities are not known." : "Its step states nothing about them."));
}

const versions = (each) => (each.versions[0] === each.versions[1] ? `v${each.versions[0]}` : `v${each.versions[0]} to v${each.versions[1]}`);
const late = (state) => state.query.get("late") ? null : h("p", {}, link(state.address({ late: 1 }), "Look for rewards that were attached later"));

export function trajectory(page, state) {
  const colour = state.query.get("colour") || "logprob", ids = state.query.get("ids") === "1";
  const seen = page.tokens && [...new Set(page.spans.map((span) => span.version))];
  const legend = page.tokens ? colour === "version" ? seen.map((version) => [`v${version}`, `v${version % 6}`]) : LEGEND[colour] : [];
  const chip = (name, label) => h("a", { href: state.address({ colour: name === "logprob" ? null : name }), class: name === colour ? "on" : "" }, label);
  return {
    title: `Trajectory ${page.partition}:${page.offset}`,
    up: page.group ? `#/group/${page.group}` : "#/search",
    siblings: page.group || null,
    body: [
      h("h1", {}, `Trajectory ${page.partition}:${page.offset}`),
      h("p", {}, fate(page), page.step !== null ? [" ", link(`#/step/${page.step}`, `step ${page.step}`)] : null, page.group ? [" · ", link(`#/group/${page.group}`, `group ${page.group}`), `, sample ${page.index}`] : null),
      missing(page.missing),
      h("p", {}, h("b", {}, rewards(page.rewards)), page.advantage !== null ? h("span", { class: page.advantage > 0 ? "good" : page.advantage < 0 ? "bad" : "" }, ` advantage ${say(page.advantage, 4)}`) : null,
        page.turn_rewards && page.turn_rewards.length ? ` · by turn ${page.turn_rewards.map((value) => say(value)).join(", ")}` : null),
      page.drop && h("p", { class: "alarm" }, `dropped at v${page.drop.version}: ${page.drop.why} ${page.drop.detail}`),
      page.frames && page.frames.length ? card("Episode", frames(page.frames)) : null,
      page.tokens ? card("Tokens",
        h("p", { class: "chips" }, "colour: ", chip("logprob", "probability"), chip("advantage", "advantage"), chip("version", "version"), chip("none", "none"), h("a", { href: state.address({ ids: ids ? null : 1 }), class: ids ? "on" : "" }, "ids")),
        h("p", { class: "legend" }, legend.map(([label, css]) => h("span", { class: `token ${css}` }, label)), page.tokens.texts ? null : " The tokenizer is not on this machine, or still loads: ids stand for text."),
        pager(state, page.window), strip(page, colour, ids), pager(state, page.window)) : h("p", {}, "Nobody can read this record."),
      page.tokens ? h("div", { class: "grid" },
        card("What it is", facts([["task", page.task], ["purpose", page.purpose], ["worker", page.worker], ["engine", page.engine], ["attempt", page.attempt], ["ended by", page.finish_reason], ["source", page.source], ["log-probabilities", `${page.logprob_source}, ${page.logprob_distribution}`],
          ["tokens", `${page.num_tokens}, of them ${page.num_generated} generated`], ["mean log-probability", say(page.mean_logprob)], ["written", time(page.time_ms)], ["waited, generated", `${say(page.milliseconds.waited)} ms, ${say(page.milliseconds.generated)} ms`], ["weights", page.weights_sha256.slice(0, 16)]])),
        learner(page), card("Versions", table(["tokens", "version"], page.spans.map((span) => [`[${span.start}, ${span.end})`, `v${span.version}`])), facts(Object.entries(page.metadata)))) : null,
      page.tokens ? h("div", { class: "grid" }, card("Prompt", h("pre", {}, page.prompt.text)), card("Answer", h("pre", {}, page.answer.text))) : null,
      late(state),
    ],
  };
}

export function dropped(page, state) {
  const chosen = ["reason", "version", "worker"].filter((name) => state.query.get(name));
  const where = (each) => (each.first === each.last ? state.address({ version: each.first, offset: null }) : null);
  return {
    title: "Dropped",
    live: true,
    body: [
      h("h1", {}, "Dropped"),
      h("p", { class: "soft" }, `${say(page.window.total)} of ${say(page.num_dropped)}. `, chosen.map((name) => link(state.address({ [name]: null, offset: null }), `${name} ${state.query.get(name)} ✕ `))),
      page.num_dropped ? h("div", { class: "grid" },
        card("By reason", bars(Object.entries(page.reasons).map(([name, count]) => [name, count, state.address({ reason: name, offset: null })]))),
        card("By the learner's version", bars(page.versions.map((each) => [each.first === each.last ? `v${each.first}` : `v${each.first} to v${each.last}`, each.count, where(each)]))),
        page.lengths.counts.length ? card("By length", histogram(page.lengths, "tokens")) : null,
        Object.keys(page.workers).length ? card("By worker, where that is why", bars(Object.entries(page.workers).map(([name, count]) => [name, count, state.address({ worker: name, offset: null })]))) : null) : h("p", { class: "empty" }, "Nothing was dropped."),
      pager(state, page.window),
      page.drops.length === 0 ? null : table(["what", "group", "why", "at", "sampled by", "tokens", "worker", "detail", "time"], page.drops.map((each) => [
        each.partition === null ? "the whole seq" : link(place(each), `${each.partition}:${each.offset}`), link(`#/group/${each.seq}`, `${each.seq}`), each.why, `v${each.version}`, each.sampled_by === null ? "–" : link(`#/lineage/${each.sampled_by}`, `v${each.sampled_by}`), each.num_tokens ? say(each.num_tokens) : "–", each.worker || "–", each.detail || "–", time(each.time_ms)])),
    ],
  };
}
