// Time to the target, fastest first, with a dot for each seed.

function arrivalText(method, fastest) {
  const arrival = method.arrival || {};
  if (isNumber(arrival.mean)) {
    const times = fastest > 0 && arrival.mean > fastest ? `  ${(arrival.mean / fastest).toFixed(1)}×` : "";
    return showSeconds(arrival.mean) + times + (isOpen(method) ? "  too close to call" : "");
  }
  if (arrival.reached) return `${arrival.reached} of ${plural(arrival.seeds || arrival.reached, "seed")}`;
  return "not reached";
}

// Whether somebody else may be first too, so that a place at the top may be chance.
function isOpen(method) {
  const rivals = allMethods().filter((one) => one.arrival && one.arrival.is_close);
  return Boolean(state.data.can_tell && method.arrival && method.arrival.is_close && rivals.length > 1);
}

function seedTimes(method) {
  return list((method.arrival || {}).runs).filter(isNumber);
}

function arrivalReach(method) {
  const arrival = method.arrival || {};
  const ends = ["accuracy", "loss", "metric"].map((key) => curveOf(method, "time", key)).filter((points) => points)
    .map((points) => points[points.length - 1].x);
  const whole = Math.max(0, ...ends) || figureOf(method, "seconds") || 0;
  return isNumber(arrival.mean) ? Math.max(arrival.mean, ...seedTimes(method)) : whole;
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

// Dots and words of each bar; drawn here because the words must stand clear of the dots.
function arrivalMarks(methods, colours, fastest) {
  return {
    type: "custom",
    name: "seeds",
    silent: true,
    z: 5,
    data: methods.map((_, place) => [arrivalReach(methods[place]), place]),
    renderItem: (_, api) => {
      const place = api.value(1);
      const method = methods[place];
      const [end, y] = api.coord([arrivalReach(method), place]);
      const children = [{
        type: "text",
        style: { text: arrivalText(method, fastest), x: end + 9, y, verticalAlign: "middle", fill: colours.ink, fontSize: 12.5,
          fontFamily: FONT },
      }];
      const seeds = list(method.arrival.runs).length > 1 ? seedTimes(method) : [];
      for (const seconds of seeds) {
        const [cx] = api.coord([seconds, place]);
        // With a rim in the colour of the page, to be seen on a bar of any colour.
        children.push({ type: "circle", shape: { cx, cy: y, r: 4 }, style: { fill: colours.ink, stroke: colours.paper, lineWidth: 1.5 } });
      }
      return { type: "group", children };
    },
  };
}

function arrivalTip(method) {
  const { mean: middle, low, high, reached, seeds } = method.arrival;
  const rows = [[null, "mean", showSeconds(middle)]];
  if (isNumber(low) && isNumber(high) && high > low) {
    rows.push([null, "95 % interval", `${showSeconds(low)} to ${showSeconds(high)}`]);
  }
  if (list(method.arrival.runs).length > 1) {
    rows.push([null, "single seeds", method.arrival.runs.map((seconds) => (isNumber(seconds) ? showSeconds(seconds) : "never")).join(", ")]);
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

function doubtWords() {
  return state.data.can_tell
    ? "Methods are compared seed by seed; a method that may be as fast as the first is marked, the others are slower."
    : "One seed says nothing about chance, so no order is certain.";
}

function arrivalFigure() {
  const methods = rankedMethods(shownMethods().filter((method) => method.arrival));
  if (!methods.length || !isNumber(state.data.target)) return null;
  const goal = state.data.score === "accuracy" ? showAccuracy(state.data.target) : `a ${state.data.score} of ${showNumber(state.data.target)}`;
  const hatched = methods.some((method) => !isNumber(method.arrival.mean));
  return figure("arrivals", {
    title: `Time to reach ${goal}`,
    caption: `Fastest first; bars are means of logarithms, dots single seeds. ${doubtWords()} ${state.data.rule || ""}`
      + (hatched ? " A hatched bar is a whole run that ended without getting there with every seed." : ""),
    height: () => rowsHeight(methods, 38, 48),
    option: arrivalOption(methods),
    numbers: () => ({
      titles: ["method", "mean", "95 % from", "to", "seeds that reach it", "seeds", "each seed"],
      rows: methods.map(({ label, arrival }) => [label,
        ...["mean", "low", "high"].map((part) => ({
          text: showSeconds(arrival[part]), value: isNumber(arrival[part]) ? arrival[part] : null,
        })), arrival.reached || 0, arrival.seeds || 0, seedTimes({ arrival }).map(showSeconds).join(", ")]),
    }),
  });
}
