// The panel of a model: its identity, source, limits, provider and parity.
import { describe, element, find, number, onCopy, short, tableRow } from "./dom.js";

function describeSource({ kind, name, revision, config_sha256: hash }, random) {
  const weights = random && "random weights from a seed, not trained ones";
  const named = [kind, name, weights, revision && `revision ${revision}`].filter(Boolean).join(", ");
  return hash ? `${named}; config sha256 ${hash.slice(0, 12)}…` : named;
}

function describeProvider(provider, choice) {
  const reason = choice.reason ? ` (${choice.reason})` : "";
  return `requested ${choice.requested}, running ${provider}${reason}`;
}

// Return the values of each argument of a grid of cases, such as "length 1, 2, 17".
function describeGrid(cases) {
  const values = new Map();
  for (const { arguments: given } of cases) {
    for (const [name, value] of Object.entries(given)) {
      values.set(name, (values.get(name) ?? new Set()).add(JSON.stringify(value)));
    }
  }
  return [...values].map(([name, found]) => `${name} ${[...found].join(", ")}`).join("; ");
}

function parityTable(provider, report) {
  const rows = Object.entries(report.outputs).map(([name, output]) =>
    tableRow(name, output.max_abs === 0 ? "equal, bit for bit" : "within tolerance", short(output.max_abs),
      `${short(output.max_ulp)} of ${short(output.allowed_ulp)}`, String(output.cases.length)));
  const heads = ["output", "verdict", "largest difference", "ULP of allowed", "cases"];
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const table = element("table", {}, element("caption", {}, provider), element("thead", {}, head),
    element("tbody", {}, ...rows));
  const scroll = element("div", { className: "scroll", tabIndex: 0, role: "region" }, table);
  scroll.setAttribute("aria-label", `Parity on ${provider}`);
  const grids = Object.entries(report.outputs).map(([name, output]) =>
    element("li", {}, `${name}: ${describeGrid(output.cases)}`));
  const software = `onnxruntime ${report.onnxruntime} compared with ${report.reference}.`;
  return [scroll, element("p", { className: "hint" }, software),
    element("details", {}, element("summary", {}, "Grid of the cases"), element("ul", {}, ...grids))];
}

// Return an identity, of which the page shows the first part, and a button that copies the whole.
function showIdentity(identity) {
  const [whole, button] = [element("code", { className: "identity", title: identity }, identity),
    element("button", { type: "button", className: "small", title: "Copy the identity" }, "Copy")];
  onCopy(button, whole, find("identity-error"));
  return element("span", { className: "fields" }, whole, button);
}

export function showModel(description) {
  const { manifest, parity } = description;
  const tokens = manifest.kind === "tokens";
  const scale = manifest.scale ? `, one scale for each ${manifest.scale}` : "";
  const outputs = Object.entries(description.outputs).map(([name, output]) => `${name} (${output.use_as})`);
  const indices = Object.entries(manifest.indices ?? {}).map(([name, count]) => `${name} 0 to ${count - 1}`);
  describe(find("facts"), [
    ["name", `${description.name}, version ${description.version}`],
    ["identity", showIdentity(description.identity)],
    ["family", manifest.family],
    ["source", describeSource(manifest.source, description.random_weights)],
    ["token ids", tokens ? `0 to ${number(manifest.vocab_size - 1)}` : null],
    ["max_len", tokens ? (description.max_len === null ? "no limit" : number(description.max_len)) : null],
    ["max_tokens", number(description.max_tokens)],
    ["width", number(manifest.width)],
    ["further inputs", indices.join(", ")],
    ["outputs", outputs.join("; ")],
    ["stored type", manifest.dtype + scale],
    ["provider", describeProvider(description.provider, description.provider_choice)],
    ["exported with", Object.entries(manifest.versions).map((pair) => pair.join(" ")).join(", ")],
  ]);
  const providers = Object.entries(parity.providers ?? {});
  find("proof").hidden = !providers.length;
  find("parity").replaceChildren(...providers.flatMap(([name, report]) => parityTable(name, report)));
}
