// The pool: workers, what they cost, and the orders to them with their reasons.

import { bars } from "./charts.js";
import { ago, card, h, link, pager, say, table, time } from "./dom.js";

const share = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);

export function pool(page, state) {
  const isPaid = page.workers.some((each) => each.price_per_hour > 0);
  return {
    title: "Pool",
    live: true,
    up: "#/",
    body: [
      h("h1", {}, "Pool"),
      page.workers.length ? h("div", { class: "numbers" }, [
        [say(page.workers.length), "workers"],
        [say(page.workers.filter((each) => each.state === "ready").length), "ready"],
        [say(page.workers.reduce((sum, each) => sum + each.trained, 0)), "samples trained"],
        ...(isPaid ? [[say(page.price_per_hour, 2), "price an hour"], [say(page.cost_per_1000, 3), "price of 1,000 samples"]] : []),
      ].map(([value, label]) => h("div", { class: "number" }, h("b", {}, value), h("span", {}, label)))) : null,
      page.workers.length === 0 ? h("p", { class: "empty" }, "No worker has said anything yet.") : card("Workers", table(
        ["worker", "kind", "engine", "host", "state", "version", "samples/s", "tokens/s", "idle", "samples", "trained", "staleness", ...(isPaid ? ["price/h"] : []), "last heard"],
        page.workers.map((each) => [
          link(`#/search?worker=${encodeURIComponent(each.worker_id)}`, each.worker_id), each.kind || "–", each.engine, each.host, h("span", { class: `fate ${each.state}` }, each.state),
          each.version === null ? "–" : link(`#/lineage/${each.version}`, `v${each.version}`), say(each.samples_per_s === null ? each.rollouts_per_s : each.samples_per_s, 1), say(each.tokens_per_s, 0), share(each.idle_share),
          say(each.rollouts), say(each.trained), each.staleness_mean === null ? "–" : `${say(each.staleness_mean, 2)}, most ${each.staleness_max}`,
          ...(isPaid ? [say(each.price_per_hour, 2)] : []), `${ago(each.silent_s)} ago`])),
      h("p", { class: "soft" }, "Idle and the price of 1,000 samples are measured from when the viewer began; samples/s too, or as the worker says itself.")),
      page.costs.length ? card("What was paid", bars(page.costs.map((each) => [[each.kind, each.use].filter(Boolean).join(", "), each.cost, null])), h("p", { class: "soft" }, "By kind and use over the whole run, as the steps' reports state it, in the currency of the prices.")) : null,
      card("Orders to workers", page.orders.length ? [pager(state, page.window), table(["time", "worker", "order", "by", "figures", "reason"], page.orders.map((each) => [
        time(each.time_ms), each.worker, each.is_active ? "take part" : "stand by", each.by, Object.entries(each.figures).map(([name, value]) => `${name} ${say(value)}`).join(", ") || "–", each.reason || h("span", { class: "soft" }, "not said")])), pager(state, page.window)]
        : h("p", { class: "empty" }, "No worker was ever ordered to stand by. `echoswarm run coordinator` does that where there are more than the run needs.")),
    ],
  };
}
