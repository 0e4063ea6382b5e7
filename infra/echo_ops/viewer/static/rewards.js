// The rewards: who scores, how far behind, and what two of them say of the same samples.

import { histogram } from "./charts.js";
import { card, facts, h, say, table } from "./dom.js";

const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);
const behind = (each) => (each.samples ? `${say(each.samples)} samples, ${say(each.seconds, 1)} s, ${each.versions} versions` : "–");
const weights = (terms) => terms.map((each) => `${each.name} × ${each.weight}`).join(", ");

function square(found) {
  const { counts, a_edges: a, b_edges: b } = found.square, most = Math.max(1, ...counts.flat());
  const cells = counts.map((row, at) => h("div", {}, row.map((count, column) => {
    const cell = h("span", { title: `${found.a} ${say(a[column], 2)} to ${say(a[column + 1], 2)}, ${found.b} ${say(b[at], 2)} to ${say(b[at + 1], 2)}: ${count}` }, count || "");
    cell.style.setProperty("--share", `${Math.round(100 * Math.sqrt(count / most))}%`);
    return cell;
  }))).reverse();
  return h("figure", {}, h("figcaption", {}, `samples by ${found.a} (to the right) and ${found.b} (upwards)`), h("div", { class: "square" }, cells),
    h("p", { class: "soft" }, `${found.a} from ${say(a[0])} to ${say(a[a.length - 1])}, ${found.b} from ${say(b[0])} to ${say(b[b.length - 1])}`));
}

function comparison(page, found) {
  const moments = (each) => `mean ${say(each.mean)}, std ${say(each.std)}, from ${say(each.minimum)} to ${say(each.maximum)}`;
  return h("div", { class: "grid" }, h("div", {}, facts([
    ["samples with both", say(found.num_matched)], [`with ${found.a}`, say(found.num_a)], [`with ${found.b}`, say(found.num_b)],
    [found.a, moments(found.of_a)], [found.b, moments(found.of_b)],
    ["Pearson, Spearman", `${say(found.pearson)}, ${say(found.spearman)}`], ["mean absolute difference", say(found.mae)],
    ["kappa", found.kappa === null ? null : say(found.kappa)],
    ["groups", say(found.num_groups)], ["rank correlation within groups", say(found.rank_within)],
    ["advantages that change their sign", percent(found.flipped)],
    [`groups without signal under ${found.a}`, percent(found.flat_a)], [`groups without signal under ${found.b}`, percent(found.flat_b)],
  ])), square(found));
}

export function rewards(page, state) {
  const chosen = page.pair, chip = (side, at) => h("p", { class: "chips" }, `${side}: `, page.names.map((name) =>
    h("a", { href: state.address(at === 0 ? { a: name, b: chosen[1] || null } : { a: chosen[0] || null, b: name }), class: chosen[at] === name ? "on" : "" }, name)));
  return {
    title: "Rewards",
    live: true,
    up: "#/",
    body: [
      h("h1", {}, "Rewards"),
      page.terms.length ? h("p", { class: "soft" }, `The next step is trained on ${weights(page.terms)}.`) : null,
      page.ordered ? h("p", { class: "answer" }, `Ordered from v${page.ordered.from_version} on: ${weights(page.ordered.terms)}.`) : null,
      page.lines.length ? card("Who scores", table(["reward", "application", "weight", "state", "share", "behind", "mean", "scored", "failed", "stale", "while it does not come", "newest error"], page.lines.map((each) => [
        each.name, each.application, each.weight ? say(each.weight) : h("span", { class: "fate" }, "shadow"), h("span", { class: `fate ${each.state.replace(/ .*/, "")}` }, each.state), percent(each.share), behind(each.behind), say(each.mean),
        say(each.scored), say(each.failed), say(each.stale), each.policy, each.error || "–"])), h("p", { class: "soft" }, "Counted over the newest records of the topic."))
        : h("p", { class: "empty" }, "Nobody scores this run yet."),
      page.values.length ? h("div", { class: "grid" }, page.values.map((each) => card(each.name, histogram(each.histogram, `${percent(each.coverage)} of ${say(each.num_judged)} samples that were judged lately`)))) : null,
      page.num_names > page.names.length ? h("p", { class: "soft" }, `${say(page.num_names)} names were heard; the first ${page.names.length} are drawn.`) : null,
      page.names.length > 1 ? card("Two rewards on the same samples", chip("first", 0), chip("second", 1),
        page.comparison ? comparison(page, page.comparison) : h("p", { class: "empty" }, "No sample among the newest has a value of both.")) : null,
    ],
  };
}
