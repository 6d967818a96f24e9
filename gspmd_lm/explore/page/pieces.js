// Which piece of an array each device holds: the arithmetic behind the pictures.
import { product, range } from "./dom.js";

// How an array lies on the mesh. `split` has, for each dimension, the mesh axes that split it, the slowest first.
export class Placement {
  constructor(mesh, array, split) {
    this.array = array;
    this.devices = mesh.devices;
    this.split = split;
    this.sizes = new Map(mesh.axes.map(({ name, size }) => [name, size]));
    this.places = new Map(mesh.axes.map(({ name }, i) => [name, i]));
    this.counts = split.map((axes) => product(axes.map((axis) => this.sizes.get(axis) ?? 1)));
  }

  // The index of a device's piece along each dimension.
  piece({ coords }) {
    return this.split.map((axes) =>
      axes.reduce((at, axis) => at * (this.sizes.get(axis) ?? 1) + (coords[this.places.get(axis)] ?? 0), 0),
    );
  }

  // The one or two dimensions that the picture tells apart, those that are split first; [down, across].
  get drawn() {
    const { shape } = this.array;
    const order = range(shape.length).sort(
      (a, b) => (this.counts[b] > 1) - (this.counts[a] > 1) || shape[b] - shape[a],
    );
    return order.slice(0, 2).sort((a, b) => a - b);
  }

  // The piece's place in the picture, as a key that a device and a rectangle have in common.
  key(piece) {
    const [down, across] = this.drawn;
    return `${piece[down] ?? 0},${piece[across] ?? 0}`;
  }

  // The colour of a place of the picture: one dimension turns the hue, the other one the lightness.
  colour(key) {
    const at = key.split(",").map(Number);
    const parts = this.drawn.map((dimension, i) => [at[i], this.counts[dimension]]);
    const whole = [0, 1];
    const [first, second] = [parts[0] || whole, parts[1] || whole];
    const [hue, shade] = first[1] > 1 ? [first, second] : [second, whole];
    const angle = 215 + (320 * hue[0]) / hue[1];
    const step = shade[1] > 1 ? shade[0] / (shade[1] - 1) : 0.5;
    return `light-dark(hsl(${angle} 55% ${88 - 22 * step}%), hsl(${angle} 40% ${20 + 11 * step}%))`;
  }

  colourOf(device) {
    return this.colour(this.key(this.piece(device)));
  }

  // The devices that hold each place of the picture, from key to devices.
  holders() {
    const found = new Map();
    for (const device of this.devices) {
      const key = this.key(this.piece(device));
      found.set(key, [...(found.get(key) || []), device]);
    }
    return found;
  }

  // The indices of the whole array that a device holds, as one writes them in Python.
  slices(device) {
    const piece = this.piece(device);
    return this.array.shape
      .map((size, i) => {
        if (this.counts[i] === 1) return ":";
        const length = size / this.counts[i];
        return `${Math.floor(piece[i] * length)}:${Math.floor((piece[i] + 1) * length)}`;
      })
      .join(", ");
  }
}
