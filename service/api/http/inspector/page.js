// The page: lists the models, asks for a key where one is needed, and fills the panels of one model.
import { ApiError, getJson, hasKey, modelPath, setKey } from "./api.js";
import { openDecode } from "./decode.js";
import { element, find, number, tableRow } from "./dom.js";
import { openEmbed } from "./embed.js";
import { showModel } from "./model.js";
import { openNeighbours } from "./neighbours.js";
import { openPositions } from "./positions.js";

const PANELS = { embed: openEmbed, neighbours: openNeighbours, positions: openPositions, decode: openDecode };
const [models, versions, status, keyForm] = ["model", "version", "status", "key-form"].map(find);

// Show the panels with these names, and the links to them.
function showPanels(names) {
  for (const section of document.querySelectorAll("main section")) {
    section.hidden = !names.includes(section.id);
    document.querySelector(`nav [href="#${section.id}"]`).hidden = section.hidden;
  }
}

// Say how the page is. Words that its controls show as well are for screen readers alone.
function say(words, shown = true) {
  status.textContent = words;
  status.className = shown ? "" : "unseen";
}

async function openModel(isOld, name, version) {
  const path = version ? modelPath({ name, version }) : `/models/${encodeURIComponent(name)}`;
  const description = await getJson(path);
  if (isOld()) return; // another model was chosen meanwhile
  const numbers = description.versions.toSorted((one, other) => other - one);
  versions.replaceChildren(...numbers.map((value) => element("option", {}, String(value))));
  versions.value = description.version;
  versions.parentElement.hidden = numbers.length < 2;
  models.value = name;
  for (const button of find("served").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.value === name));
  }
  const tokens = description.manifest.kind === "tokens";
  const shown = tokens ? Object.keys(PANELS).filter((panel) => PANELS[panel](description)) : [];
  showPanels(["overview", "identity", ...shown]);
  showModel(description);
  say(tokens ? `${name}, version ${description.version}` : `${name} takes images or spectrograms.`, !tokens);
}

function showModels(found) {
  find("choices").hidden = !found.length;
  models.replaceChildren(...found.map(({ name, random_weights: random }) =>
    element("option", { value: name }, random ? `${name} (random weights)` : name)));
  find("served").replaceChildren(...found.map((model) => {
    const open = element("button", { type: "button", className: "small", value: model.name }, model.name);
    open.addEventListener("click", () => attemptOpening((isOld) => openModel(isOld, model.name)));
    const { vocab_size: ids, max_len: limit, random_weights: random } = model;
    const limits = ids === null ? ["–", "–"]
      : [`0 to ${number(ids - 1)}`, limit === null ? "no limit" : number(limit)];
    return tableRow(open, random ? "random weights" : "loaded", model.family, ...limits);
  }));
}

async function openService(isOld) {
  showPanels([]);
  say("Loading the models.");
  // The path of a model cannot hold a slash; such an alias is a further name of a model in the list.
  const found = (await getJson("/models")).filter(({ name, ready }) => ready && !name.includes("/"));
  keyForm.hidden = true;
  showModels(found);
  const first = found.find(({ random_weights: random }) => !random) ?? found[0];
  if (first) await openModel(isOld, first.name);
  else say("No model is ready.");
}

let attempts = 0;

// Run `open`. Its argument returns whether a later attempt has begun, which the error of this one must not hide.
async function attemptOpening(open) {
  const turn = ++attempts;
  const isOld = () => turn !== attempts;
  try {
    await open(isOld);
  } catch (error) {
    if (isOld()) return;
    showPanels(find("served").hasChildNodes() ? ["overview"] : []);
    say(error.message);
    if (error instanceof ApiError && error.status === 401) {
      say(hasKey() ? error.message : "This service needs an API key.");
      keyForm.hidden = false;
      find("key").focus();
    }
  }
}

models.addEventListener("change", () => attemptOpening((isOld) => openModel(isOld, models.value)));
versions.addEventListener("change", () => attemptOpening((isOld) => openModel(isOld, models.value, versions.value)));
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(find("key").value);
  find("key").value = "";
  attemptOpening(openService);
});
attemptOpening(openService);
