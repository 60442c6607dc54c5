// The page: chooses a model, asks for a key where one is needed, and fills the panels.
import { ApiError, getJson, hasKey, modelPath, setKey } from "./api.js";
import { openDecode } from "./decode.js";
import { element, find, number } from "./dom.js";
import { openEmbed } from "./embed.js";
import { showModel } from "./model.js";
import { openNeighbours } from "./neighbours.js";
import { openPositions } from "./positions.js";

const PANELS = ["embed", "positions", "decode", "neighbours"];
const ALL = ["identity", ...PANELS];
const [models, versions, status, keyForm] = ["model", "version", "status", "key-form"].map(find);

function hidePanels(names) {
  for (const name of ALL) find(name).hidden = names.includes(name);
}

let requested = 0;

async function openModel(name, version) {
  const turn = ++requested;
  const path = version ? modelPath({ name, version }) : `/models/${encodeURIComponent(name)}`;
  const description = await getJson(path);
  if (turn !== requested) return; // another model was chosen meanwhile
  const numbers = description.versions.toSorted((one, other) => other - one);
  versions.replaceChildren(...numbers.map((value) => element("option", {}, String(value))));
  versions.value = description.version;
  const tokens = description.manifest.kind === "tokens";
  hidePanels(tokens ? [] : PANELS);
  showModel(description);
  status.textContent = tokens ? `${name}, version ${description.version}` : `${name} takes images or spectrograms.`;
  if (!tokens) return;
  for (const open of [openEmbed, openDecode, openNeighbours, openPositions]) open(description);
}

async function openService() {
  hidePanels(ALL);
  status.textContent = "Loading the models.";
  const found = (await getJson("/models")).filter(({ ready }) => ready);
  keyForm.hidden = true;
  models.replaceChildren(...found.map(({ name, family, max_len: limit, random_weights: random }) =>
    element("option", { value: name },
      `${name} (${family}${limit ? `, ${number(limit)} positions` : ""}${random ? ", random weights" : ""})`)));
  if (found.length) await openModel(found[0].name);
  else status.textContent = "No model is ready.";
}

async function attemptOpening(open) {
  try {
    await open();
  } catch (error) {
    hidePanels(ALL);
    status.textContent = error.message;
    if (error instanceof ApiError && error.status === 401) {
      status.textContent = hasKey() ? error.message : "This service needs an API key.";
      keyForm.hidden = false;
      find("key").focus();
    }
  }
}

models.addEventListener("change", () => attemptOpening(() => openModel(models.value)));
versions.addEventListener("change", () => attemptOpening(() => openModel(models.value, versions.value)));
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(find("key").value);
  find("key").value = "";
  attemptOpening(openService);
});
attemptOpening(openService);
