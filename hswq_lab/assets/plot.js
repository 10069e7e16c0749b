// A plotly figure in a notebook. plotly.js comes once for a page, from a model that all figures share; a figure is
// drawn when its place on the page has a width, drawn again when that changes, and updated in place.
const SHARED = Symbol.for("hswq_lab.plotly");
const CONFIG = { displaylogo: false };
const BAR = 34; // pixels at the right that plotly's tool bar covers

function plotly(code) {
  if (!globalThis[SHARED]) {
    // The library looks for a module system first: it gets one of its own, and leaves the page's alone.
    const module = `const module = { exports: {} };
      (function (module, exports, define) { ${code}\n }).call(globalThis, module, module.exports, undefined);
      export default module.exports;`;
    const url = URL.createObjectURL(new Blob([module], { type: "text/javascript" }));
    globalThis[SHARED] = import(url).then((loaded) => loaded.default);
  }
  return globalThis[SHARED];
}

// plotly breaks no lines: a subtitle wider than the plot would be cut off, or run under the tool bar. Each further line gets the room it needs.
function fitted(layout, width) {
  const subtitle = layout.title?.subtitle;
  if (!subtitle?.text) return layout;
  const base = layout.template?.layout ?? {};
  const font = { size: 12, ...base.font, ...base.title?.subtitle?.font };
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${font.size}px ${font.family}`;
  const room = width - 2 * (base.title?.pad?.l ?? 0) - BAR;
  const lines = [""];
  for (const word of subtitle.text.split(" ")) {
    const line = `${lines.at(-1)} ${word}`.trim();
    if (lines.at(-1) === "" || pen.measureText(line).width <= room) lines[lines.length - 1] = line;
    else lines.push(word);
  }
  const more = (lines.length - 1) * 1.3 * font.size;
  return {
    ...layout,
    height: (layout.height ?? 450) + more,
    margin: { ...layout.margin, t: (layout.margin?.t ?? base.margin?.t ?? 100) + more },
    title: { ...layout.title, subtitle: { ...subtitle, text: lines.join("<br>") } },
  };
}

async function render({ model, el }) {
  const place = document.createElement("div");
  place.setAttribute("role", "figure");
  place.style.width = "100%";
  el.appendChild(place);
  const part = (name) => model.widget_manager.get_model(model.get(name).slice("IPY_MODEL_".length));
  const [source, drawing] = await Promise.all([part("source"), part("drawing")]);
  const Plotly = await plotly(source.get("code"));
  let drawn = false;

  function figure() {
    const { data, layout: asked } = structuredClone(drawing.get("value"));
    const layout = fitted(asked, place.clientWidth);
    const title = layout.title && layout.title.text ? layout.title.text : "a plot";
    place.setAttribute("aria-label", title);
    place.style.height = `${layout.height || 450}px`;
    return [data, { ...layout, width: place.clientWidth, autosize: false }];
  }

  function draw() {
    if (place.clientWidth === 0) return; // hidden or not on the page yet; the observer calls again
    const [data, layout] = figure();
    Plotly.react(place, data, layout, { ...CONFIG, displayModeBar: data.length > 0 && "hover" });
    if (!drawn) {
      drawn = true;
      place.on("plotly_click", (event) => {
        const point = event.points[0];
        model.send({ event: "click", x: String(point.x), note: [].concat(point.customdata ?? []) });
      });
    }
  }

  let width = 0;
  const observer = new ResizeObserver(() => {
    if (place.clientWidth === width) return;
    width = place.clientWidth;
    draw();
  });
  observer.observe(place);
  drawing.on("change:value", draw);
  draw();
  return () => {
    observer.disconnect();
    drawing.off("change:value", draw);
    Plotly.purge(place);
  };
}

export default { render };
