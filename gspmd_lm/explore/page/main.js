// The page: each view watches its part of the state.
import "./actions.js";
import "./arrays.js";
import "./changes.js";
import "./controls.js";
import "./editor.js";
import "./headline.js";
import "./layer.js";
import "./search.js";
import "./timeline.js";
import { follow } from "./state.js";

follow();
