// The address says which page; this fetches what it needs, draws it, moves by keyboard, and draws again while the run goes on.

import { card, h, link } from "./dom.js";
import { lineage } from "./lineage.js";
import * as pages from "./pages.js";
import { pool } from "./pool.js";
import { rewards } from "./rewards.js";
import { search, sql } from "./search.js";
import { timeline } from "./timeline.js";

const LIVE_MS = 4000, SEARCH_MS = 700;
const NAV = [["o", "#/", "Overview"], ["m", "#/metrics", "Metrics"], ["s", "#/steps", "Steps"], ["t", "#/timeline", "Timeline"], ["r", "#/rewards", "Rewards"], ["p", "#/pool", "Pool"],
  ["l", "#/lineage", "Lineage"], ["d", "#/dropped", "Dropped"], ["/", "#/search", "Search"], ["q", "#/sql", "SQL"]];
const main = document.getElementById("page"), live = document.getElementById("live");
let current = {}, turn = 0, timer = 0, source = "live";

function read() {
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  const [, name, ...rest] = path.split("/");
  const values = new URLSearchParams(query || "");
  return {
    path, name: name || "overview", rest: rest.join("/"), query: values,
    address(changes) {
      const next = new URLSearchParams(values);
      for (const [key, value] of Object.entries(changes)) {
        next.delete(key);
        for (const each of Array.isArray(value) ? value : [value]) if (each !== null) next.append(key, each);
      }
      return `#${path}${next.size ? `?${next}` : ""}`;
    },
  };
}

async function ask(path, query = "") {
  const response = await fetch(`/api/${path}${query ? `?${query}` : ""}`);
  const body = await response.json();
  if (!response.ok) throw new Error(`${body.error} ${body.hint || ""}`);
  return body;
}

// What of the address the server is asked for: colours, smoothing and the like are the browser's.
function asked(state, ...own) {
  const values = new URLSearchParams(state.query);
  own.forEach((name) => values.delete(name));
  return String(values);
}

const LOADERS = {
  overview: async (state) => pages.overview(...await Promise.all([ask("overview"), state, ask("metrics"), ask("steps", "limit=8")])),
  metrics: async (state) => pages.metrics(await ask("metrics", asked(state, "smooth")), state),
  steps: async (state) => pages.steps(await ask("steps", asked(state)), state),
  step: async (state) => pages.step(await ask(`step/${encodeURIComponent(state.rest)}`, asked(state)), state),
  group: async (state) => pages.group(await ask(`group/${encodeURIComponent(state.rest)}`, asked(state)), state),
  trajectory: async (state) => pages.trajectory(await ask(`trajectory/${state.rest}`, asked(state, "colour", "ids")), state),
  timeline: async (state) => timeline(await ask("timeline", asked(state)), state),
  pool: async (state) => pool(await ask("pool", asked(state)), state),
  rewards: async (state) => rewards(await ask("rewards", asked(state)), state),
  lineage: async (state) => lineage(await ask(`lineage/${encodeURIComponent(state.rest || (await ask("overview")).version)}`)),
  search: async (state) => search([...state.query].length ? await ask("search", asked(state)) : null, state),
  sql: async (state) => sql(state.query.get("question") ? await ask("sql", asked(state)).catch((error) => ({ error: error.message })) : null, state),
  dropped: async (state) => pages.dropped(await ask("dropped", asked(state)), state),
};

function draw(page) {
  current = page;
  document.title = `${page.title} · EchoSwarm`;
  const way = [page.previous && link(page.previous, "‹ previous"), page.up && link(page.up, "up"), page.next && link(page.next, "next ›")].filter(Boolean);
  main.replaceChildren(...[way.length ? h("p", { class: "way" }, way) : null, ...page.body.flat(9)].filter((each) => each instanceof Node));
}

async function show(isAgain) {
  const mine = ++turn, state = read(), loader = LOADERS[state.name];
  clearTimeout(timer);
  document.querySelectorAll("#nav a").forEach((each) => each.classList.toggle("on", each.getAttribute("href") === `#/${state.name === "overview" ? "" : state.name}`));
  if (!isAgain) main.classList.add("waiting");
  try {
    if (!loader) throw new Error("There is no such page.");
    const page = await loader(state);
    if (mine !== turn) return;
    draw(page);
    live.textContent = page.live ? source : "";
    if (!isAgain) scrollTo(0, 0);
    if (page.going) follow(page.going, state, mine);
    else if (page.live) again();
    if (page.siblings) siblings(page, state, mine);
  } catch (error) {
    if (mine !== turn) return;
    live.textContent = "";
    if (isAgain) { live.textContent = "no answer"; again(); }
    else draw({ title: "Nothing here", up: "#/", body: [card("Nothing here", h("p", {}, error.message))] });
  } finally {
    if (mine === turn) main.classList.remove("waiting");
  }
}

// Draws anew as the run goes on; not while nobody looks, and not under the focus of whoever moves by keyboard.
function again() {
  timer = setTimeout(() => (document.hidden || main.contains(document.activeElement) && document.activeElement !== main ? again() : show(true)), LIVE_MS);
}

// A search that goes on: its hits come in, and what is typed meanwhile stays.
async function follow(name, state, mine) {
  for (;;) {
    await new Promise((resolve) => { timer = setTimeout(resolve, SEARCH_MS); });
    if (mine !== turn) return;
    const page = await ask(`search/${name}`, "limit=500").catch(() => null);
    if (mine !== turn || !page) return;
    const drawn = search(page, state), form = main.querySelector("form");
    draw(drawn);
    if (form) main.querySelector("form").replaceWith(form);
    if (page.is_done) return;
  }
}

// The samples beside this one, for the arrow keys: asked for after the page is there.
async function siblings(page, state, mine) {
  const group = await ask(`group/${page.siblings}`, "limit=64").catch(() => null);
  if (mine !== turn || !group) return;
  const at = group.samples.findIndex((each) => `${each.partition}:${each.offset}` === state.rest);
  const to = (each) => each && `#/trajectory/${each.partition}:${each.offset}${state.query.size ? `?${state.query}` : ""}`;
  if (at >= 0) draw({ ...page, previous: to(group.samples[at - 1]), next: to(group.samples[at + 1]) });
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA|BUTTON)$/.test(event.target.tagName)) return;
  const onLink = event.target.tagName === "A";
  const target = { ArrowLeft: current.previous, ArrowRight: current.next, ArrowUp: scrollY === 0 ? current.up : null, u: current.up, Enter: onLink ? null : current.inside }[event.key]
    || (NAV.find(([key]) => key === event.key) || [])[1];
  if (!target) return;
  event.preventDefault();
  location.hash = target;
});
addEventListener("hashchange", () => show(false));

ask("overview").then((page) => {
  document.getElementById("run").textContent = page.run;
  if (page.is_export) source = "export";
  if (live.textContent === "live") live.textContent = source;
}).catch(() => {});
document.getElementById("keys").replaceChildren(...NAV.map(([key]) => h("kbd", { title: "a page" }, key)));
document.getElementById("nav").replaceChildren(...NAV.map(([key, address, name]) => h("a", { href: address, title: `key ${key}` }, name)));
show(false);
