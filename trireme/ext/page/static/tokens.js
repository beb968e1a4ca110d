// Each token with its mask, log-probabilities, ratio, advantage and weight version.
import { ask } from "./api.js";
import { fill, h, number, segments } from "./dom.js";
import { pictures } from "./pictures.js";

const MOST = 4000; // tokens drawn at once
const MEASURES = {
  mask: { title: "Trained", what: "trained tokens are coloured" },
  sampled: { title: "Sampled", what: "what the model wrote is coloured; nothing of it is trained" },
  logprobs: { title: "Log-probability", what: "what the sampling policy gave the token: the stronger, the more surprising", low: 0, high: -5, one: true },
  trained_logprobs: { title: "Log-probability", what: "what the model gave the token before this step's update: the stronger, the more surprising", low: 0, high: -5, one: true },
  ratio: { title: "Ratio", what: "new policy ÷ sampling policy, at the step that trained it", middle: 1, span: 0.2 },
  advantages: { title: "Advantage", what: "what the token's gradient is weighted by", middle: 0, span: 1.5 },
  versions: { title: "Weights", what: "version that sampled the token" },
};
let measure = "advantages";
let asTable = false;

export async function tokens(body, row, { run }) {
  const found = await ask("tokens", { run, kind: row.kind, eid: row.eid });
  const heldOut = row.kind === "eval";
  if (heldOut) found.sampled = found.mask; // an evaluation trains nothing
  const there = Object.keys(MEASURES).filter((name) => found[name] && !(heldOut && name === "mask") && (name !== "trained_logprobs" || !found.logprobs));
  if (!there.includes(measure)) measure = there[0];
  found.pictures = pictures(run, row.pictures);
  const again = () => draw(body, found, there, again);
  again();
}

function tint(found, at) {
  const value = found[measure]?.[at];
  if (!found.mask[at] && measure !== "versions" && measure !== "logprobs") return "transparent";
  if (measure === "mask" || measure === "sampled") return value ? "color-mix(in srgb, #2f9e62 26%, transparent)" : "transparent";
  if (value === null || value === undefined) return "transparent";
  const { middle, span, high, one } = MEASURES[measure];
  if (measure === "versions") return value < 0 ? "transparent" : `hsl(${(value * 47) % 360} 60% 55% / 28%)`;
  if (one) return `color-mix(in srgb, #c25b2a ${Math.round(Math.min(Math.max(value / high, 0), 1) * 62)}%, transparent)`;
  if (value === middle) return "transparent";
  const strength = Math.min(Math.abs(value - middle) / span, 1);
  return `color-mix(in srgb, ${value >= middle ? "#2f9e62" : "#cf4a3f"} ${Math.round(8 + strength * 48)}%, transparent)`;
}

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "→\t");

function scale() {
  const { middle, span, one, high, low } = MEASURES[measure];
  if (middle !== undefined) return h("span.scale", {}, number(middle - span), h("i", { style: { background: "linear-gradient(90deg, color-mix(in srgb, #cf4a3f 56%, transparent), transparent, color-mix(in srgb, #2f9e62 56%, transparent))" } }), number(middle + span));
  if (one) return h("span.scale", {}, number(low), h("i", { style: { background: "linear-gradient(90deg, transparent, color-mix(in srgb, #c25b2a 62%, transparent))" } }), number(high));
  return null;
}

function draw(body, found, there, again) {
  const probe = h("div.probe", { "aria-live": "off" }, h("span", {}, "Point at a token, or walk with the arrow keys."));
  const shown = Math.min(found.text.length, MOST);
  const show = (at) => {
    for (const one of flow.querySelectorAll(".on")) one.classList.remove("on");
    flow.children[at]?.classList.add("on");
    const facts = [["token", `${at} · id ${found.ids[at]}`], [found.sampled ? "sampled" : "trained", found.mask[at] ? "yes" : "no"], ["log-probability", value(found.logprobs, at)], ["new", value(found.trained_logprobs, at)], ["ratio", value(found.ratio, at, 4)], ["advantage", value(found.advantages, at)], ["weights", found.versions?.[at] >= 0 ? found.versions[at] : "–"]];
    fill(probe, h("b.mono", {}, JSON.stringify(found.text[at])), facts.map(([name, text]) => h("span", {}, `${name} `, h("b", {}, String(text)))));
  };
  let at = -1;
  const flow = h("div.tokens", { tabindex: 0, role: "group", "aria-label": "Tokens",
    onkeydown: (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      at = Math.min(Math.max(at + move, 0), shown - 1);
      show(at);
    },
    onmouseover: (event) => { if (event.target.dataset.at) { at = Number(event.target.dataset.at); show(at); } } });
  for (let place = 0; place < shown; place += 1) {
    flow.append(h(`span.token${found.mask[place] ? "" : ".data"}`, { "data-at": place, style: { background: tint(found, place) } }, visible(found.text[place])));
  }
  fill(body, h("div.spaced", { style: { gap: "12px" } },
    h("div.bar", {}, segments(there.map((name) => [name, MEASURES[name].title]), measure, (name) => { measure = name; again(); }, "Colour by"), scale(), h("span.grow"), segments([[false, "Text"], [true, "Table"]], asTable, (table) => { asTable = table; again(); }, "Form")),
    h("p.quiet", {}, [MEASURES[measure].what, found.trained_step !== null && found.trained_step !== undefined ? `trained in step ${found.trained_step}` : null, shown < found.text.length ? `the first ${shown} of ${found.text.length} tokens` : null].filter(Boolean).join("; "), "."),
    found.notes.map((note) => h("p.quiet", {}, note)),
    found.pictures,
    asTable ? table(found, shown) : [flow, probe]));
}

const value = (values, at, digits = 3) => (values && values[at] !== null && values[at] !== undefined ? number(values[at], digits) : "–");

function table(found, shown) {
  const heads = ["Place", "Token", found.sampled ? "Sampled" : "Trained", "Log-probability", "New", "Ratio", "Advantage", "Weights"];
  const rows = [];
  for (let at = 0; at < shown; at += 1) {
    rows.push(h("tr", {}, h("td.num", {}, String(at)), h("td.mono", {}, JSON.stringify(found.text[at])), h("td", {}, found.mask[at] ? "yes" : ""),
      ["logprobs", "trained_logprobs"].map((name) => h("td.num", {}, value(found[name], at))), h("td.num", {}, value(found.ratio, at, 4)), h("td.num", {}, value(found.advantages, at)), h("td.num", {}, found.versions?.[at] >= 0 ? String(found.versions[at]) : "–")));
  }
  return h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, heads.map((name, place) => h(place === 1 || place === 2 ? "th" : "th.num", {}, name)))), h("tbody", {}, rows)));
}
