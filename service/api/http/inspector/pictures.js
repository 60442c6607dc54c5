// Drawings: a heat map of rows with its axes, and a ruler of positions.
import { element, short } from "./dom.js";

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

// Red, green and blue of 0, which is the page, of the lowest value, and of the highest.
const LIGHT = [[255, 255, 255], [5, 80, 160], [165, 15, 20]];
const DARK = [[20, 24, 27], [110, 180, 255], [255, 130, 110]];

// Draw rows of equal width, one pixel for each value. `most` is the value of the strongest colour.
function drawHeatmap(canvas, rows, most) {
  const [height, width] = [rows.length, rows[0].length];
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const [ground, low, high] = isDark() ? DARK : LIGHT;
  let place = 0;
  for (const row of rows) {
    for (const value of row) {
      const end = value < 0 ? low : high;
      const share = Math.min(1, Math.abs(value) / (most || 1));
      for (let part = 0; part < 3; part++) image.data[place++] = ground[part] + (end[part] - ground[part]) * share;
      image.data[place++] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}

// Write a few numbers, and the name of an axis, beside the cells of a heat map: `count` cells from `first` on.
function showAxis(axis, side, { name, first, count }, most) {
  const rough = count / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough));
  axis.replaceChildren(element("span", { className: "name" }, name));
  for (let value = Math.ceil(first / step) * step; value < first + count; value += step) {
    const tick = element("span", { className: "tick" }, String(value));
    tick.style[side] = `${((value - first + 0.5) / count) * 100}%`;
    axis.append(tick);
  }
}

function showLegend(legend, most) {
  const [ground, low, high] = isDark() ? DARK : LIGHT;
  const scale = element("span", { className: "scale" });
  scale.style.background = `linear-gradient(to right, rgb(${low}), rgb(${ground}), rgb(${high}))`;
  legend.replaceChildren(short(-most), scale, short(most));
}

// Draw a heat map with the axes `down` and `across`, each with a name and its first number, and the scale
// of the colours. `most` is the value of the strongest colour. Mark the rows `begin` to `end`.
export function drawPlot(canvas, rows, down, across, most, begin = 0, end = 0) {
  drawHeatmap(canvas, rows, most);
  const plot = canvas.parentElement;
  const [left, below, legend] = [".down", ".across", ".legend"].map((name) => plot.querySelector(name));
  showAxis(left, "insetBlockStart", { ...down, count: rows.length }, 8);
  showAxis(below, "insetInlineStart", { ...across, count: rows[0].length }, 5);
  showLegend(legend, most);
  if (end <= begin) return;
  const window = element("span", { className: "window" });
  window.style.insetBlockStart = `${(begin / rows.length) * 100}%`;
  window.style.blockSize = `${((end - begin) / rows.length) * 100}%`;
  left.append(window);
}

// Return the lowest and the highest value of rows, and a value for the strongest colour: a few outliers would leave the
// rest without colour.
export function measure(rows) {
  let [least, most, squares] = [Infinity, -Infinity, 0];
  for (const row of rows) {
    for (const value of row) {
      [least, most] = [Math.min(least, value), Math.max(most, value)];
      squares += value * value;
    }
  }
  const spread = 3 * Math.sqrt(squares / (rows.length * rows[0].length));
  return { least, most, strongest: Math.min(Math.max(-least, most), spread) };
}

// Draw the positions 0 to `length`, the window `begin` to `end`, and the end of the model at `limit`.
export function drawRuler(canvas, length, begin, end, limit) {
  canvas.width = canvas.clientWidth;
  canvas.height = canvas.clientHeight;
  const context = canvas.getContext("2d");
  const place = (position) => (position / length) * canvas.width;
  context.fillStyle = isDark() ? "#2f3b43" : "#dfe6ea";
  context.fillRect(0, 0, place(Math.min(limit, length)), canvas.height);
  context.fillStyle = isDark() ? "#8ccbee" : "#0b5c85";
  context.fillRect(place(begin), 4, Math.max(3, place(end - begin)), canvas.height - 8);
  if (limit <= length) {
    context.fillStyle = isDark() ? "#ff9c94" : "#a11a1a";
    context.fillRect(place(limit) - 2, 0, 2, canvas.height);
  }
}

// Return the cosine of every pair of rows; a row of zeros has cosine 0.
export function cosines(rows) {
  const dot = (one, other) => {
    let sum = 0;
    for (let place = 0; place < one.length; place++) sum += one[place] * other[place];
    return sum;
  };
  const norms = rows.map((row) => Math.sqrt(dot(row, row)) || 1);
  return rows.map((row, i) => Float64Array.from(rows, (other, j) => dot(row, other) / norms[i] / norms[j]));
}
