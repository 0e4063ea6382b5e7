// Where a version's weights come from, and what became of the samples that it made.

import { bars } from "./charts.js";
import { card, facts, h, link, say, time } from "./dom.js";

const MOST_GROUPS = 60;
const parentOf = (published) => (published.parent_run ? `forked from ${published.parent_run} v${published.parent}` : null);

function made(version, step, published) {
  return [
    card("Made from", facts([
      ["weights of", published && parentOf(published) || (version > 0 ? link(`#/lineage/${version - 1}`, `v${version - 1}`) : "the base model")],
      ["checkpoint", step.checkpoint], ["of checkpoint", step.parent || "the base model"], ["session", step.session], ["when", time(step.time_ms)],
      ["trained", `${say(step.training_s, 2)} s on ${step.world_size} rank${step.world_size === 1 ? "" : "s"}`],
      ["batch", [link(`#/step/${version}`, `${say(step.num_samples)} samples`), ` of ${say(step.num_groups)} groups`]],
      ["judged by", step.terms.map((each) => `${each.name} × ${each.weight}`).join(", ")],
      ["rewards", step.rewards.map((each) => `${each.name} ${say(each.mean)} ± ${say(each.std)}`).join(", ")],
      ["staleness budget", step.budget]])),
    card("Sampled by versions", bars(step.sampled_by.map((each) => [`v${each.version}`, each.count, `#/lineage/${each.version}`]))),
    card("Sampled by workers", bars(step.workers.map((each) => [each.worker, each.count, `#/search?worker=${encodeURIComponent(each.worker)}&step=${version}`]))),
  ];
}

export function lineage(page) {
  const { version, step, published } = page;
  const trained = page.trained.reduce((sum, each) => sum + each.count, 0), dropped = Object.values(page.dropped).reduce((sum, count) => sum + count, 0);
  return {
    title: `Lineage v${version}`,
    previous: page.previous === null ? null : `#/lineage/${page.previous}`,
    next: page.next === null ? null : `#/lineage/${page.next}`,
    up: step ? `#/step/${version}` : "#/",
    inside: step && step.groups.length ? `#/group/${step.groups[0]}` : null,
    body: [
      h("h1", {}, `Version ${version}`),
      h("p", { class: "soft" }, published ? `Published ${time(published.time_ms)}, ${published.kind}, ${say(published.num_bytes)} bytes, sha256 ${published.sha256.slice(0, 16)}` : "Not published: no worker sampled with it."),
      step && step.missing ? h("p", { class: "alarm" }, `The batch is gone: ${step.missing}.`) : null,
      h("div", { class: "grid" },
        step ? made(version, step, published) : card("Made from", h("p", {}, published && parentOf(published) ? `No step of this run made it: it was ${parentOf(published)}.` : "No step made it: the run began with it.")),
        card("What became of its samples", trained + dropped ? [
          trained ? bars(page.trained.map((each) => [`step ${each.step}`, each.count, `#/step/${each.step}`]), "trained in") : null,
          dropped ? bars(Object.entries(page.dropped).map(([reason, count]) => [reason, count, `#/dropped?reason=${reason}`]), "dropped") : null,
          h("p", { class: "soft" }, `${say(trained)} trained, ${say(dropped)} dropped. `, link(`#/search?version=${version}`, "Look at them"))]
          : h("p", { class: "empty" }, published ? "None was trained or dropped so far." : "It made none."))),
      step && step.groups.length ? card("Groups of its batch", h("p", { class: "chips" }, step.groups.slice(0, MOST_GROUPS).map((seq) => h("a", { href: `#/group/${seq}` }, seq)),
        step.groups.length > MOST_GROUPS ? link(`#/step/${version}`, `and ${say(step.groups.length - MOST_GROUPS)} more`) : null)) : null,
      h("p", { class: "soft" }, "A sample counts for the oldest version that made a token of it. Told from the learner's reports and drops: what is still open is not among it."),
    ],
  };
}
