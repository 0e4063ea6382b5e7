// Frames of an episode: Sokoban boards, poker tables, texts.

import { h, say } from "./dom.js";

const CELLS = { "#": "wall", _: "floor", O: "target", "√": "done", X: "box", P: "player", S: "player" };
const SIGNS = { O: "○", "√": "■", X: "■", P: "●", S: "●" };
const SUITS = { c: "♣", d: "♦", h: "♥", s: "♠" };

function board(text, label) {
  return h("div", { class: "board", role: "img", "aria-label": `the board, ${label}` }, text.split("\n").map((row) =>
    h("div", {}, [...row].map((cell) => h("span", { class: CELLS[cell] || "floor", title: CELLS[cell] }, SIGNS[cell] || " ")))));
}

// `Ah` is the ace of hearts; other cards have names.
function playing(name) {
  const suit = name.length === 2 ? SUITS[name[1]] : null;
  return suit ? h("span", { class: `playing ${"dh".includes(name[1]) ? "red" : ""}` }, name[0] === "T" ? "10" : name[0], suit) : h("span", { class: "playing" }, name);
}

function pokerTable(table, label) {
  const seat = (chips, at) => h("span", { class: at === table.seat ? "seat you" : "seat" }, h("b", {}, at === table.seat ? "you" : `seat ${at + 1}`), ` ${say(chips)}`);
  return h("div", { class: "poker", role: "img", "aria-label": `the table, ${label}` },
    h("div", { class: "seats" }, table.stacks.map(seat)),
    h("div", { class: "felt" }, table.hand.length < 2 ? null : h("div", {}, table.board.length ? table.board.map(playing) : h("span", { class: "soft" }, "no cards yet")), h("div", {}, `pot ${say(table.pot)}`)),
    h("div", { class: "hand" }, table.hand.map(playing)),
    h("div", { class: "soft" }, table.said.length ? table.said.join("; ") : "no bets yet"));
}

export function frames(all) {
  return h("div", { class: "frames" }, all.map((frame) => h("figure", {},
    frame.board ? board(frame.board, frame.label) : frame.table ? pokerTable(frame.table, frame.label) : h("pre", {}, frame.text),
    h("figcaption", { class: "soft" }, frame.label))));
}
