// A client for ONNX bundles, written from docs/bundle-format.md alone.
//
//     node walk.mjs BUNDLE PHOTOS
//
// A bundle's folder and a folder of PNG and JPEG files go in; JSON comes out: label, exit and confidence of each photo, and
// how far the client is from the bundle's golden tensors and photos.

import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { basename, join } from "node:path";
import jpeg from "jpeg-js";
import ort from "onnxruntime-node";
import { PNG } from "pngjs";

const float = Math.fround;

// ---- Files

function readBundle(folder) {
  const manifest = JSON.parse(readFileSync(join(folder, "bundle.json"), "utf8"));
  if (manifest.schema > 2) throw new Error("the bundle is newer than this client");
  if (manifest.format !== "onnx") throw new Error("this client runs ONNX bundles only");
  const files = {};
  for (const [name, digest] of Object.entries(manifest.files)) {
    if (basename(name) !== name || name === "..") throw new Error(`${name} is no file of a bundle`);
    files[name] = readFileSync(join(folder, name));
    if (createHash("sha256").update(files[name]).digest("hex") !== digest) throw new Error(`${name} is damaged`);
  }
  const [card, policies] = ["model.json", "policy.json"].map((name) => JSON.parse(files[name].toString("utf8")));
  if (card.schema !== 1 || policies.schema !== 1) throw new Error("the bundle is of another schema");
  if (card.costs.join() !== policies.costs.join()) throw new Error("the policy is for another network");
  return { files, card, policies };
}

/** The arrays of an .npz file: a zip of stored .npy files, read from the central directory. */
function readNpz(data) {
  const arrays = {};
  let end = data.length - 22;
  while (data.readUInt32LE(end) !== 0x06054b50) end -= 1;
  let at = data.readUInt32LE(end + 16);
  for (let n = data.readUInt16LE(end + 10); n > 0; n -= 1) {
    if (data.readUInt16LE(at + 10) !== 0) throw new Error("golden.npz is compressed");
    const [size, nameLength] = [data.readUInt32LE(at + 24), data.readUInt16LE(at + 28)];
    const local = data.readUInt32LE(at + 42);
    const begin = local + 30 + data.readUInt16LE(local + 26) + data.readUInt16LE(local + 28);
    const name = data.toString("utf8", at + 46, at + 46 + nameLength);
    arrays[name.replace(/\.npy$/, "")] = readNpy(data.subarray(begin, begin + size));
    at += 46 + nameLength + data.readUInt16LE(at + 30) + data.readUInt16LE(at + 32);
  }
  return arrays;
}

function readNpy(data) {
  const begin = 10 + data.readUInt16LE(8);
  const header = data.toString("latin1", 10, begin);
  const shape = header.match(/'shape': \(([^)]*)\)/)[1].split(",").filter((word) => word.trim()).map(Number);
  const kind = header.match(/'descr': '([^']*)'/)[1];
  if (!/'fortran_order': False/.test(header)) throw new Error("an array lies the other way");
  const bytes = new Uint8Array(data.subarray(begin));
  if (kind === "|u1") return { shape, values: bytes };
  if (kind === "<f4") return { shape, values: new Float32Array(bytes.buffer) };
  throw new Error(`an array is ${kind}`);
}

// ---- From a file to an array. An image is {width, height, pixels}, three bytes a pixel.

function readImage(data) {
  const isPng = data.readUInt32BE(0) === 0x89504e47;
  return upright(isPng ? decodePng(data) : decodeJpeg(data), orientation(isPng ? pngExif(data) : jpegExif(data)));
}

/** Steps 1 and 3: turning moves pixels and nothing else, so that it may come after. */
function decodePng(data) {
  const png = PNG.sync.read(data, { skipRescale: true });
  const { width, height, depth, colorType } = png;
  const [grey, palette] = [colorType === 0 || colorType === 4, colorType === 3];
  const eight = (v) => {
    if (palette || depth === 8) return v;
    if (depth === 16) return colorType === 0 ? Math.floor(v / 257) : v >> 8;
    return (v * 255) / (2 ** depth - 1);
  };
  const pixels = new Uint8Array(3 * width * height);
  for (let i = 0; i < width * height; i += 1) {
    const alpha = eight(png.data[4 * i + 3]);
    for (let c = 0; c < 3; c += 1) pixels[3 * i + c] = onWhite(eight(png.data[4 * i + (grey ? 0 : c)]), alpha);
  }
  return { width, height, pixels };
}

function onWhite(s, a) {
  return Math.floor((s * a + 255 * (255 - a) + 127) / 255);
}

function decodeJpeg(data) {
  const { width, height, data: pixels } = jpeg.decode(data, { useTArray: true, formatAsRGBA: false });
  return { width, height, pixels };
}

/** What follows "Exif" and two zeros in the segment APP1. */
function jpegExif(data) {
  for (let at = 2; data[at] === 0xff && data[at + 1] !== 0xda; at += 2 + data.readUInt16BE(at + 2)) {
    if (data[at + 1] === 0xe1 && data.toString("latin1", at + 4, at + 8) === "Exif") {
      return data.subarray(at + 10, at + 2 + data.readUInt16BE(at + 2));
    }
  }
  return undefined;
}

function pngExif(data) {
  for (let at = 8; at + 8 <= data.length; at += 12 + data.readUInt32BE(at)) {
    if (data.toString("latin1", at + 4, at + 8) === "eXIf") return data.subarray(at + 8, at + 8 + data.readUInt32BE(at));
  }
  return undefined;
}

/** The EXIF tag 274, or 1. */
function orientation(tiff) {
  if (!tiff) return 1;
  const little = tiff.toString("latin1", 0, 2) === "II";
  const short = (at) => (little ? tiff.readUInt16LE(at) : tiff.readUInt16BE(at));
  const first = little ? tiff.readUInt32LE(4) : tiff.readUInt32BE(4);
  for (let n = 0; n < short(first); n += 1) {
    if (short(first + 2 + 12 * n) === 274) return short(first + 2 + 12 * n + 8);
  }
  return 1;
}

/** Step 2. */
function upright(image, value) {
  const { width: w, height: h } = image;
  const from = {
    2: (x, y) => [w - 1 - x, y],
    3: (x, y) => [w - 1 - x, h - 1 - y],
    4: (x, y) => [x, h - 1 - y],
    5: (x, y) => [y, x],
    6: (x, y) => [y, h - 1 - x],
    7: (x, y) => [w - 1 - y, h - 1 - x],
    8: (x, y) => [w - 1 - y, x],
  }[value];
  if (!from) return image;
  return value < 5 ? drawn(w, h, image, from) : drawn(h, w, image, from);
}

/** An image whose pixel (x, y) is that of another at from(x, y). */
function drawn(width, height, image, from) {
  const pixels = new Uint8Array(3 * width * height);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const [column, row] = from(x, y);
      for (let c = 0; c < 3; c += 1) pixels[3 * (y * width + x) + c] = image.pixels[3 * (row * image.width + column) + c];
    }
  }
  return { width, height, pixels };
}

/** Step 4. */
function middle(image) {
  const most = 20 * Math.min(image.width, image.height);
  const [left, top] = [image.width, image.height].map((side) => Math.max(0, Math.floor((side - most) / 2)));
  return drawn(image.width - 2 * left, image.height - 2 * top, image, (x, y) => [x + left, y + top]);
}

/** Step 5. */
function resized(image, { resize, interpolation }) {
  const [short, long] = [Math.min(image.width, image.height), Math.max(image.width, image.height)];
  if (short === resize) return image;
  const longer = Math.max(resize, Math.floor((resize * long) / short));
  const [width, height] = image.width <= image.height ? [resize, longer] : [longer, resize];
  const columnsFirst = image.height > height && image.height - height > 2 * (image.width - width);
  const kind = interpolation ?? "bilinear";
  if (columnsFirst) return rowsTo(columnsTo(image, height, kind), width, kind);
  return columnsTo(rowsTo(image, width, kind), height, kind);
}

function rowsTo(image, width, kind) {
  if (image.width === width) return image;
  const out = { width, height: image.height, pixels: new Uint8Array(3 * width * image.height) };
  for (let y = 0; y < image.height; y += 1) {
    for (let c = 0; c < 3; c += 1) {
      resizeLine(image, 3 * y * image.width + c, 3, image.width, out, 3 * y * width + c, 3, width, kind);
    }
  }
  return out;
}

function columnsTo(image, height, kind) {
  if (image.height === height) return image;
  const step = 3 * image.width;
  const out = { width: image.width, height, pixels: new Uint8Array(step * height) };
  for (let x = 0; x < step; x += 1) resizeLine(image, x, step, image.height, out, x, step, height, kind);
  return out;
}

function resizeLine(from, fromBegin, fromStep, n, to, toBegin, toStep, m, kind) {
  filters(n, m, kind).forEach(({ first, weights }, i) => {
    let sum = 2 ** 21;
    weights.forEach((k, j) => {
      sum += from.pixels[fromBegin + (first + j) * fromStep] * k;
    });
    to.pixels[toBegin + i * toStep] = Math.min(255, Math.max(0, sum >> 22));
  });
}

const known = new Map();

function filters(n, m, kind) {
  const key = `${n} ${m} ${kind}`;
  if (!known.has(key)) known.set(key, Array.from({ length: m }, (_, i) => filter(n, m, i, kind)));
  return known.get(key);
}

const curves = {
  bilinear: { reach: 1, f: (x) => Math.max(0, 1 - Math.abs(x)) },
  bicubic: {
    reach: 2,
    f: (signed) => {
      const x = Math.abs(signed);
      if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
      return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
    },
  },
};

function filter(n, m, i, kind) {
  if (!curves[kind]) throw new Error(`the interpolation ${kind} is not known`);
  const { reach, f } = curves[kind];
  const scale = n / m;
  const wide = Math.max(scale, 1);
  const support = reach * wide;
  const centre = (i + 0.5) * scale;
  const first = Math.max(0, Math.trunc(centre - support + 0.5));
  const last = Math.min(n, Math.trunc(centre + support + 0.5));
  const w = [];
  for (let j = first; j < last; j += 1) w.push(f((j - centre + 0.5) * (1 / wide)));
  const total = w.reduce((a, b) => a + b, 0);
  return { first, weights: w.map((one) => Math.trunc((one / total < 0 ? -0.5 : 0.5) + (one / total) * 2 ** 22)) };
}

/** Step 6, and the channels one after the other. */
function cropped(image, size) {
  const [left, top] = [image.width, image.height].map((side) => halfToEven((side - size) / 2));
  const array = new Uint8Array(3 * size * size);
  for (let c = 0; c < 3; c += 1) {
    for (let y = 0; y < size; y += 1) {
      for (let x = 0; x < size; x += 1) {
        array[(c * size + y) * size + x] = image.pixels[3 * ((y + top) * image.width + x + left) + c];
      }
    }
  }
  return array;
}

function halfToEven(value) {
  const down = Math.floor(value);
  if (value - down !== 0.5) return Math.round(value);
  return down % 2 === 0 ? down : down + 1;
}

function cut(data, preprocessing) {
  return cropped(resized(middle(readImage(data)), preprocessing), preprocessing.size);
}

// ---- From an array to an answer

function normalised(array, { size, mean, std }) {
  const input = new Float32Array(array.length);
  for (let i = 0; i < array.length; i += 1) {
    const c = Math.floor(i / (size * size)) % 3;
    const [scale, shift] = [float(1 / (255 * std[c])), float(-mean[c] / std[c])];
    input[i] = float(float(array[i] * scale) + shift);
  }
  return new ort.Tensor("float32", input, [array.length / (3 * size * size), 3, size, size]);
}

async function step(session, state) {
  const found = await session.run(Object.fromEntries(state.map((tensor, i) => [`state_${i}`, tensor])));
  const next = [];
  while (found[`next_${next.length}`]) next.push(found[`next_${next.length}`]);
  return [found.logits, next];
}

function confidence(logits, measure, temperature) {
  const z = Array.from(logits, (one) => (temperature === null ? one : float(one / float(temperature))));
  const top = Math.max(...z);
  const powers = z.map((one) => Math.exp(one - top));
  const total = powers.reduce((a, b) => a + b, 0);
  const p = powers.map((one) => one / total);
  if (measure === "max_softmax") return float(Math.max(...p));
  if (measure === "margin") {
    const [best, second] = [...p].sort((a, b) => b - a);
    return float(best - second);
  }
  if (measure !== "entropy") throw new Error(`the measure ${measure} is not known`);
  const sum = p.reduce((a, b) => a + (b === 0 ? 0 : b * Math.log(b)), 0);
  return float(Math.min(1, Math.max(0, 1 + sum / Math.log(p.length))));
}

async function answer(bundle, sessions, array) {
  const { policies, card } = bundle;
  const { thresholds } = policies.policies[policies.chosen];
  let state = [normalised(array, card.preprocessing)];
  for (let k = 1; ; k += 1) {
    const [logits, next] = await step(sessions[k - 1], state);
    const sure = confidence(logits.data, policies.measure, policies.temperatures && policies.temperatures[k - 1]);
    const leaves = k === sessions.length || (thresholds[k - 1] !== null && sure >= float(thresholds[k - 1]));
    if (leaves) return { label: logits.data.indexOf(Math.max(...logits.data)), exit: k, confidence: sure };
    state = next;
  }
}

// ---- Golden files

async function goldenTensors(bundle, sessions, golden) {
  let [state, at, largest] = [[normalised(golden.images.values, bundle.card.preprocessing)], 0, 0];
  for (const session of sessions) {
    const [logits, next] = await step(session, state);
    for (const value of logits.data) largest = Math.max(largest, Math.abs(value - golden.logits.values[at++]));
    state = next;
  }
  return largest;
}

async function goldenPhotos(bundle, sessions, golden) {
  const length = golden.photos.values.length / golden.photos.shape[0];
  const rows = [];
  for (const [i, photo] of JSON.parse(bundle.files["photos.json"].toString("utf8")).photos.entries()) {
    const wanted = golden.photos.values.subarray(i * length, (i + 1) * length);
    const found = cut(bundle.files[photo.file], bundle.card.preprocessing);
    const difference = found.reduce((most, value, j) => Math.max(most, Math.abs(value - wanted[j])), 0);
    rows.push({ file: photo.file, difference, ...(await answer(bundle, sessions, wanted)) });
  }
  return rows;
}

const [folder, photos] = process.argv.slice(2);
const bundle = readBundle(folder);
const stages = bundle.card.costs.map((_, i) => bundle.files[`stage-${i + 1}.onnx`]);
const sessions = [];
for (const stage of stages) sessions.push(await ort.InferenceSession.create(stage, { intraOpNumThreads: 1 }));
const golden = readNpz(bundle.files["golden.npz"]);
const rows = [];
for (const file of readdirSync(photos).sort()) {
  const array = cut(readFileSync(join(photos, file)), bundle.card.preprocessing);
  rows.push({ file, ...(await answer(bundle, sessions, array)) });
}
const tensors = await goldenTensors(bundle, sessions, golden);
console.log(JSON.stringify({ tensors, golden: await goldenPhotos(bundle, sessions, golden), photos: rows }));
