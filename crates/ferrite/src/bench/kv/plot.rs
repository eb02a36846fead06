//! Plots latencies as an SVG that any browser shows.
//!
//! Both axes are logarithmic: percentiles by their nines (99 to 99.9 is as wide as 90 to 99), and
//! time by decades. So the tail is easy to see; a linear plot hides it in the last pixel.

use std::fmt::Write as _;

use hdrhistogram::Histogram;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 560.0;
/// Margins of the plot: above, below, left. The one on the right depends on the labels.
const MARGINS: [f64; 3] = [64.0, 110.0, 84.0];
/// The largest width of a character, estimated for a sans-serif font of 13 pixels.
const CHARACTER_WIDTH: f64 = 7.6;
/// The smallest distance between two labels, so that they do not overlap.
const LABEL_HEIGHT: f64 = 17.0;
/// The width, in characters, at which the text below the plot is wrapped.
const FOOTER_CHARACTERS: usize = 118;
const FOOTER_LINES: usize = 3;
/// Number of points of a line for each nine of the percentile.
const STEPS_PER_NINE: u32 = 8;
const NINES_MAX: u32 = 6;
/// Colours that people with colour blindness can tell apart.
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];
/// Patterns of lines: solid, dashed, dotted, mixed.
const DASHES: [&str; 4] = ["", "8 4", "2 4", "10 4 2 4"];

/// The latencies of one test.
pub(super) struct Line {
    test: String,
    /// The transport, if there are several.
    group: Option<String>,
    /// For each point, the number of nines of the percentile, and the latency in microseconds.
    points: Vec<(f64, f64)>,
}

impl Line {
    /// Builds a line from latencies in nanoseconds. The line ends at the highest percentile that at
    /// least one request exceeds.
    #[expect(clippy::cast_precision_loss, reason = "fewer than 2^53 nanoseconds and requests")]
    pub(super) fn new(test: &str, group: Option<&str>, latency: &Histogram<u64>) -> Self {
        let nines = (0..=NINES_MAX * STEPS_PER_NINE)
            .map(|step| f64::from(step) / f64::from(STEPS_PER_NINE));
        let seen = nines.take_while(|nines| latency.len() as f64 * 10_f64.powf(-nines) >= 1.0);
        let at = |nines: f64| latency.value_at_quantile(1.0 - 10_f64.powf(-nines)) as f64 / 1e3;
        Self {
            test: test.to_owned(),
            group: group.map(str::to_owned),
            points: seen.map(|nines| (nines, at(nines).max(1e-3))).collect(),
        }
    }

    fn label(&self) -> String {
        match &self.group {
            Some(group) => format!("{}, {group}", self.test),
            None => self.test.clone(),
        }
    }
}

/// Returns the colour and the pattern of a line. With groups, each group has a colour and each test
/// has a pattern. Without groups, each test has a colour.
fn style(line: &Line, lines: &[Line]) -> (&'static str, &'static str) {
    let index_of = |values: Vec<&str>, value: &str| {
        let mut different: Vec<&str> = Vec::new();
        values.into_iter().for_each(|one| {
            if !different.contains(&one) {
                different.push(one);
            }
        });
        different.iter().position(|one| *one == value).unwrap_or(0)
    };
    let test = index_of(lines.iter().map(|line| line.test.as_str()).collect(), &line.test);
    match &line.group {
        None => (COLOURS[test % COLOURS.len()], ""),
        Some(group) => {
            let groups = lines.iter().filter_map(|line| line.group.as_deref()).collect();
            let group = index_of(groups, group);
            (COLOURS[group % COLOURS.len()], DASHES[test % DASHES.len()])
        }
    }
}

/// The edges of the plot within the picture, and the ranges of its axes.
struct Area {
    above: f64,
    bottom: f64,
    left: f64,
    end: f64,
    /// Range of the horizontal axis, in nines, and of the vertical axis, in powers of ten.
    nines: f64,
    low: f64,
    high: f64,
}

impl Area {
    fn new(lines: &[Line]) -> Self {
        let points = || lines.iter().flat_map(|line| &line.points);
        let nines = points().map(|point| point.0).fold(1.0, f64::max).ceil();
        let (low, high) = points()
            .map(|point| point.1.log10())
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), at| {
                (low.min(at), high.max(at))
            });
        let (low, high) = if low.is_finite() {
            (low.floor(), high.ceil().max(low.floor() + 1.0))
        } else {
            (0.0, 1.0)
        };
        let label = lines.iter().map(|line| line.label().chars().count()).max().unwrap_or(0);
        #[expect(clippy::cast_precision_loss, reason = "labels are short")]
        let right = 52.0 + CHARACTER_WIDTH * label.min(40) as f64;
        let [above, below, left] = MARGINS;
        Self { above, bottom: HEIGHT - below, left, end: WIDTH - right, nines, low, high }
    }

    fn x(&self, nines: f64) -> f64 {
        self.left + (self.end - self.left) * nines / self.nines
    }

    fn y(&self, us: f64) -> f64 {
        let part = (us.log10() - self.low) / (self.high - self.low);
        self.bottom - (self.bottom - self.above) * part
    }
}

/// Returns the SVG. The lines of `origin` stand below the plot.
pub(super) fn svg(subtitle: &str, lines: &[Line], origin: &[String]) -> String {
    let area = Area::new(lines);
    let left = area.left;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{left}\" y=\"26\" font-size=\"17\">Latency by percentile</text>\n\
         <text x=\"{left}\" y=\"46\" fill=\"#555\">{}</text>\n",
        escaped(subtitle)
    );
    axes(&area, &mut out);
    curves(&area, lines, &mut out);
    let footer = origin.iter().flat_map(|line| wrapped(line)).take(FOOTER_LINES);
    for (line, y) in footer.zip([HEIGHT - 44.0, HEIGHT - 28.0, HEIGHT - 12.0]) {
        let _ = writeln!(
            out,
            "<text x=\"{left}\" y=\"{y}\" fill=\"#777\" font-size=\"11\">{}</text>",
            escaped(&line)
        );
    }
    out + "</svg>\n"
}

/// Draws the grid with the labels of both axes, and their titles.
fn axes(area: &Area, out: &mut String) {
    let Area { above, bottom, left, end, .. } = *area;
    let half = 2_f64.log10();
    let percentiles =
        (0..=round_to_u32(area.nines)).map(|step| (f64::from(step), percentile(step)));
    for (nines, label) in percentiles.chain([(half, "50 %".to_owned())]) {
        let at = area.x(nines);
        let _ = writeln!(
            out,
            "<path d=\"M{at:.1} {above}V{bottom}\" stroke=\"#ddd\"/>\
             <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            bottom + 20.0
        );
    }
    for step in 0..=round_to_u32(area.high - area.low) {
        let decade = area.low + f64::from(step);
        for factor in [1.0, 2.0, 5.0] {
            let us = 10_f64.powf(decade) * factor;
            if us.log10() > area.high + 1e-9 {
                break;
            }
            let at = area.y(us);
            let colour = if factor < 2.0 { "#ccc" } else { "#eee" };
            let _ = writeln!(
                out,
                "<path d=\"M{left} {at:.1}H{end:.1}\" stroke=\"{colour}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 8.0,
                at + 4.0,
                time(decade, factor)
            );
        }
    }
    let (middle, centre) = (f64::midpoint(left, end), f64::midpoint(above, bottom));
    let _ = writeln!(
        out,
        "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555\">\
         percentile of requests</text>\n\
         <text transform=\"translate(18 {centre:.1}) rotate(-90)\" text-anchor=\"middle\" \
         fill=\"#555\">latency</text>",
        bottom + 42.0
    );
}

/// Draws the lines. Each label stands on the right, next to a sample of its line, and is joined to
/// the end of that line.
fn curves(area: &Area, lines: &[Line], out: &mut String) {
    let mut labels = Vec::new();
    for line in lines {
        let path: Vec<_> = line
            .points
            .iter()
            .map(|(nines, us)| format!("{:.1} {:.1}", area.x(*nines), area.y(*us)))
            .collect();
        let Some((last_nines, last_us)) = line.points.last() else { continue };
        let (colour, dashes) = style(line, lines);
        let dashes = match dashes {
            "" => String::new(),
            dashes => format!(" stroke-dasharray=\"{dashes}\""),
        };
        let _ = writeln!(
            out,
            "<path d=\"M{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" \
             stroke-linejoin=\"round\"{dashes}/>",
            path.join("L"),
        );
        let end = (area.x(*last_nines), area.y(*last_us));
        labels.push((end, format!("stroke=\"{colour}\"{dashes}"), colour, line.label()));
    }
    labels.sort_by(|one, other| one.0.1.total_cmp(&other.0.1));
    let places = spread(&labels.iter().map(|label| label.0.1).collect::<Vec<_>>(), area.bottom);
    for (((x, y), stroke, colour, label), place) in labels.into_iter().zip(places) {
        let _ = writeln!(
            out,
            "<path d=\"M{:.1} {y:.1}L{:.1} {place:.1}\" stroke=\"{colour}\" \
             stroke-opacity=\"0.3\" fill=\"none\"/>\
             <path d=\"M{:.1} {place:.1}h24\" {stroke} stroke-width=\"2\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{}</text>",
            x + 2.0,
            area.end + 16.0,
            area.end + 16.0,
            area.end + 44.0,
            place + 4.0,
            escaped(&label)
        );
    }
}

/// Moves sorted heights apart, so that labels there do not overlap. The last is at most `bottom`.
fn spread(wanted: &[f64], bottom: f64) -> Vec<f64> {
    let mut places = wanted.to_vec();
    for index in 1..places.len() {
        places[index] = places[index].max(places[index - 1] + LABEL_HEIGHT);
    }
    let mut limit = bottom;
    for place in places.iter_mut().rev() {
        *place = place.min(limit);
        limit = *place - LABEL_HEIGHT;
    }
    places
}

/// Breaks a line between words.
fn wrapped(line: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in line.split(' ') {
        let last = lines.last_mut().map_or(0, |last| last.chars().count());
        if last > 0 && last + 1 + word.chars().count() > FOOTER_CHARACTERS {
            lines.push(format!("  {word}"));
        } else if let Some(line) = lines.last_mut() {
            *line += if last > 0 { " " } else { "" };
            *line += word;
        }
    }
    lines
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small and not negative"
)]
fn round_to_u32(count: f64) -> u32 {
    count.round() as u32
}

fn percentile(nines: u32) -> String {
    match nines {
        0 => "0 %".into(),
        1 => "90 %".into(),
        2 => "99 %".into(),
        _ => format!("99.{} %", "9".repeat(nines as usize - 2)),
    }
}

/// Formats `factor` times ten to the power of `decade` microseconds, with a unit.
fn time(decade: f64, factor: f64) -> String {
    let (unit, above) = match decade {
        below if below < 0.0 => ("ns", -3.0),
        below if below < 3.0 => ("µs", 0.0),
        below if below < 6.0 => ("ms", 3.0),
        _ => ("s", 6.0),
    };
    format!("{:.0} {unit}", 10_f64.powf(decade - above) * factor)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(test: &str, group: Option<&str>, latencies: impl IntoIterator<Item = u64>) -> Line {
        let mut histogram = Histogram::new_with_bounds(1, 10_000_000_000, 3).expect("bounds");
        latencies.into_iter().for_each(|ns| histogram.record(ns).expect("in bounds"));
        Line::new(test, group, &histogram)
    }

    #[test]
    fn line_ends_at_the_last_request() {
        let hundred = line("set", None, (1..=100).map(|number| number * 1000));
        let (nines, us) = hundred.points.last().expect("points");
        assert!((nines - 2.0).abs() < 1e-9 && (us - 99.0).abs() < 0.2, "{nines} {us}");
        assert!(line("get", None, []).points.is_empty());
    }

    #[test]
    fn labels_axes_lines_and_origin() {
        let lines = [
            line("set", None, (0..1000).map(|_| 50_000)),
            line("<get>", None, (0..1000).map(|number| number * 20_000)),
        ];
        let text = svg("a & b", &lines, &["ferrite 1, today".into(), "ferrite bench".into()]);
        for expected in [
            "a &amp; b",
            ">50 %<",
            ">90 %<",
            ">99.9 %<",
            ">10 µs<",
            ">20 µs<",
            ">10 ms<",
            ">set<",
            ">&lt;get&gt;<",
            ">percentile of requests<",
            ">latency<",
            ">ferrite 1, today<",
            ">ferrite bench<",
        ] {
            assert!(text.contains(expected), "no {expected} in {text}");
        }
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n") && !text.contains("NaN"));
        assert_eq!(text.matches("stroke-linejoin").count(), 2, "one path for each line");
    }

    #[test]
    fn transports_have_colours_and_tests_have_patterns() {
        let lines = ["set", "get"].iter().flat_map(|test| {
            ["TCP", "RDMA"].map(|group| line(test, Some(group), (0..10).map(|_| 50_000)))
        });
        let lines: Vec<_> = lines.collect();
        let styles: Vec<_> = lines.iter().map(|line| style(line, &lines)).collect();
        assert_eq!(styles[0].0, styles[2].0);
        assert_eq!(styles[0].1, styles[1].1);
        assert!(styles[0].0 != styles[1].0 && styles[0].1 != styles[2].1, "{styles:?}");
        assert!(svg("", &lines, &[]).contains(">get, RDMA<"));
    }

    #[test]
    fn labels_of_equal_lines_do_not_overlap() {
        assert_eq!(spread(&[10.0, 10.0, 11.0, 90.0], 100.0), [10.0, 27.0, 44.0, 90.0]);
        assert_eq!(spread(&[99.0, 100.0], 100.0), [83.0, 100.0]);
    }

    /// Lines of equal latencies end at the same point of the picture, so their labels must be moved
    /// apart.
    #[test]
    fn labels_in_the_picture_do_not_overlap() {
        let tests = ["set", "get", "mixed", "PING"];
        let lines = tests.map(|test| line(test, None, (0..1000).map(|_| 50_000)));
        let text = svg("", &lines, &[]);
        let mut heights = tests.map(|test| {
            let (before, _) = text.split_once(&format!(">{test}</text>")).expect("a label");
            let (_, y) = before.rsplit_once(" y=\"").expect("a height");
            y.split('"').next().and_then(|y| y.parse::<f64>().ok()).expect("a number")
        });
        heights.sort_by(f64::total_cmp);
        let rounding = 0.11;
        let has_room = |pair: &[f64]| pair[1] - pair[0] >= LABEL_HEIGHT - rounding;
        assert!(heights.windows(2).all(has_room), "{heights:?}");
        assert!(heights.iter().all(|y| (0.0..HEIGHT).contains(y)), "{heights:?}");
    }

    #[test]
    fn long_command_lines_are_wrapped() {
        let line = ["word"; 60].join(" ");
        let lines = wrapped(&line);
        assert!(lines.len() == 3 && lines.iter().all(|line| line.len() <= FOOTER_CHARACTERS + 2));
        assert_eq!(lines.join(" ").split_whitespace().count(), 60);
    }

    #[test]
    fn plots_a_test_without_requests() {
        assert!(!svg("none", &[line("get", None, [])], &[]).contains("NaN"));
    }

    #[test]
    fn formats_times_with_units() {
        let names: Vec<_> = [-1.0, 0.0, 2.0, 3.0, 5.0, 6.0].map(|decade| time(decade, 1.0)).into();
        assert_eq!(names, ["100 ns", "1 µs", "100 µs", "1 ms", "100 ms", "1 s"]);
        assert_eq!(time(1.0, 5.0), "50 µs");
    }
}
