// Bytes and seconds as gspmd_lm/units.py writes them.

const BYTES = [
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
];
const SECONDS = [
  [1, "s"],
  [1e-3, "ms"],
  [0, "us"],
];

export function writeBytes(bytes) {
  const [size, unit] = BYTES.find(([factor]) => bytes >= factor) || [1, "B"];
  return unit === "B" ? `${Math.round(bytes)} B` : `${(bytes / size).toFixed(1)} ${unit}`;
}

export function writeSeconds(seconds) {
  const [least, unit] = seconds ? SECONDS.find(([factor]) => seconds >= factor) : SECONDS[0];
  const value = seconds / (least || 1e-6);
  return `${value >= 100 ? Math.round(value) : +value.toPrecision(3)} ${unit}`;
}
