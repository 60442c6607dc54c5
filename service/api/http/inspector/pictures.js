// Drawings on a canvas: a heat map of rows, and a ruler of positions.

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

// Red, green and blue of 0, which is the page, of the lowest value, and of the highest.
const LIGHT = [[255, 255, 255], [5, 80, 160], [165, 15, 20]];
const DARK = [[20, 24, 27], [110, 180, 255], [255, 130, 110]];

// Draw rows of equal width, one pixel for each value, and mark the rows `begin` to `end`. Return the value of the
// strongest colour: a few outliers would leave the rest without colour.
export function drawHeatmap(canvas, rows, begin, end) {
  const [height, width] = [rows.length, rows[0].length];
  let [largest, squares] = [0, 0];
  for (const row of rows) {
    for (const value of row) {
      largest = Math.max(largest, Math.abs(value));
      squares += value * value;
    }
  }
  const most = Math.min(largest, 3 * Math.sqrt(squares / (height * width)));
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
  if (end > begin) {
    context.fillStyle = isDark() ? "#ffe08a" : "#000";
    context.fillRect(0, begin, Math.max(2, width / 100), end - begin);
    context.fillRect(width - Math.max(2, width / 100), begin, width, end - begin);
  }
  return most;
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
