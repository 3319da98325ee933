// Time to the target, fastest first, with the interval of the mean.

function arrivalText(method, fastest) {
  const arrival = method.arrival || {};
  if (isNumber(arrival.mean)) {
    const times = fastest > 0 && arrival.mean > fastest ? `  ${(arrival.mean / fastest).toFixed(1)}×` : "";
    return showSeconds(arrival.mean) + times;
  }
  if (arrival.reached) return `${arrival.reached} of ${plural(arrival.seeds || arrival.reached, "seed")}`;
  return "not reached";
}

function arrivalReach(method) {
  const arrival = method.arrival || {};
  const ends = ["accuracy", "loss"].map((key) => curveOf(method, "time", key)).filter((points) => points)
    .map((points) => points[points.length - 1].x);
  const whole = Math.max(0, ...ends) || figureOf(method, "seconds") || 0;
  return isNumber(arrival.mean) ? Math.max(arrival.mean, arrival.high || 0) : whole;
}

function arrivalBars(methods, colours) {
  return methods.map((method) => {
    const look = lookOf(method);
    const isReached = isNumber(method.arrival.mean);
    const hatch = { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [1.5, 6], rotation: -Math.PI / 4, color: look.colour };
    return {
      value: isReached ? method.arrival.mean : arrivalReach(method),
      itemStyle: isReached ? { color: look.colour }
        : { color: colours.paper, borderColor: look.colour, borderWidth: 1, decal: hatch },
    };
  });
}

// Whisker and words of each bar; drawn here because the words must stand clear of the whisker.
function arrivalMarks(methods, colours, fastest) {
  return {
    type: "custom",
    name: "intervals",
    silent: true,
    z: 5,
    data: methods.map((_, place) => [arrivalReach(methods[place]), place]),
    renderItem: (_, api) => {
      const place = api.value(1);
      const method = methods[place];
      const { low, high, mean: middle } = method.arrival;
      const [end, y] = api.coord([arrivalReach(method), place]);
      const children = [{
        type: "text",
        style: { text: arrivalText(method, fastest), x: end + 9, y, verticalAlign: "middle", fill: colours.ink, fontSize: 12.5,
          fontFamily: FONT },
      }];
      if (isNumber(middle) && isNumber(low) && isNumber(high) && high > low) {
        const [left] = api.coord([Math.max(0, low), place]);
        const [right] = api.coord([high, place]);
        const strokes = [[left, y, right, y], [left, y - 5, left, y + 5], [right, y - 5, right, y + 5]];
        // Each over a wider one in the colour of the page, to be seen on a bar of any colour.
        for (const [stroke, lineWidth] of [[colours.paper, 4], [colours.ink, 1.5]]) {
          for (const [x1, y1, x2, y2] of strokes) children.push({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke, lineWidth } });
        }
      }
      return { type: "group", children };
    },
  };
}

function arrivalTip(method) {
  const { mean: middle, low, high, reached, seeds } = method.arrival;
  const rows = [[null, "mean", showSeconds(middle)]];
  if (isNumber(low) && isNumber(high) && high > low) {
    rows.push([null, "95 % interval", `${showSeconds(Math.max(0, low))} to ${showSeconds(high)}`]);
  }
  rows.push([null, "seeds that reach it", `${reached || 0} of ${seeds || 0}`]);
  return tooltipBox(method.label, rows);
}

function arrivalOption(methods) {
  return (width, colours) => {
    const fastest = methods[0].arrival.mean;
    const reach = Math.max(...methods.map(arrivalReach)) || 1;
    const room = labelRoom(methods, width);
    const words = Math.max(...methods.map((method) => arrivalText(method, fastest).length)) * 7.4 + 16;
    const plot = Math.max(60, width - room - words);
    return {
      grid: { left: room, right: 4, top: 4, bottom: 40 },
      xAxis: {
        ...linearAxis(colours, 0, (reach * (width - room)) / plot, showTick),
        name: timeWord(), nameLocation: "middle", nameGap: 26, splitNumber: width < 500 ? 3 : 6,
        axisLabel: { color: colours.faint, fontSize: 12, showMaxLabel: false, hideOverlap: true, formatter: showTick },
      },
      yAxis: methodAxis(colours, methods, width),
      tooltip: tooltip(colours, { trigger: "item", formatter: ({ dataIndex }) => arrivalTip(methods[dataIndex]) }),
      series: [
        { type: "bar", name: "time to target", barMaxWidth: 24, barCategoryGap: "36%", data: arrivalBars(methods, colours) },
        arrivalMarks(methods, colours, fastest),
      ],
    };
  };
}

function arrivalFigure() {
  const methods = rankedMethods(shownMethods().filter((method) => method.arrival));
  if (!methods.length || !isNumber(state.data.target)) return null;
  const goal = state.data.score === "loss" ? `a loss of ${showNumber(state.data.target)}` : showAccuracy(state.data.target);
  const hatched = methods.some((method) => !isNumber(method.arrival.mean));
  return figure("arrivals", {
    title: `Time to reach ${goal}`,
    caption: "Fastest first. Whiskers are 95 % intervals of the mean over seeds: where two overlap, the order may be chance."
      + (hatched ? " A hatched bar is a whole run that ended without getting there with every seed." : ""),
    height: () => rowsHeight(methods, 38, 48),
    option: arrivalOption(methods),
    numbers: () => ({
      titles: ["method", "mean", "low", "high", "seeds that reach it", "seeds"],
      rows: methods.map(({ label, arrival }) => [label,
        ...["mean", "low", "high"].map((part) => ({
          text: showSeconds(arrival[part]), value: isNumber(arrival[part]) ? arrival[part] : null,
        })), arrival.reached || 0, arrival.seeds || 0]),
    }),
  });
}
