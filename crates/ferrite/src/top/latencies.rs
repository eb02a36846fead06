//! The table of latencies: a row for each operation, a column for each percentile.

use super::snapshot::LatencyRow;

/// Number of rows that a box shows.
const ROWS: usize = 6;
/// The least width of the column of names.
const NAME_WIDTH: usize = 8;
/// The least width of a column of figures, with a space before the figures.
const FIGURE_WIDTH: usize = 6;
/// The longest name of a column. The rest of a longer name is left out.
const COLUMN_NAME_MAX: usize = 7;

/// The rows and columns that a box shows, as text.
pub(super) struct Latencies {
    columns: Vec<String>,
    /// The name of each operation, and its figures.
    rows: Vec<(String, Vec<String>)>,
}

impl Latencies {
    /// Chooses the rows and columns to show.
    ///
    /// There is space for three percentiles. If there are more, shows the lowest and the two
    /// highest. Operations that people often measure come first, then the others. In both groups,
    /// the slowest comes first.
    pub(super) fn of(latencies: &[LatencyRow]) -> Self {
        // All rows have the same percentiles.
        let all = latencies.first().map(|row| row.percentiles.as_slice()).unwrap_or_default();
        let all: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        let columns = match &all[..] {
            [lowest, .., high, highest] => vec![*lowest, *high, *highest],
            few => few.to_vec(),
        };
        let slowest = |row: &LatencyRow| {
            // With the default percentiles, this is p99: the highest percentile is often a single
            // outlier.
            let column = columns.get(1).or(columns.first());
            column.and_then(|name| row.at(name)).unwrap_or_default()
        };
        let rank = |name: &str| !matches!(name, "get" | "set" | "send" | "write" | "read");
        let mut rows: Vec<_> = latencies.iter().collect();
        rows.sort_by(|one, other| {
            // This is a total order, even if the engine reports a value that is not a number.
            let by_rank = rank(&one.name).cmp(&rank(&other.name));
            by_rank.then(slowest(other).total_cmp(&slowest(one)))
        });
        let figures = |row: &LatencyRow| {
            let figures = columns.iter().map(|column| match row.at(column) {
                Some(us @ 1000.0..) => format!("{us:.0}"),
                Some(us) => format!("{us:.1}"),
                None => "-".to_owned(),
            });
            figures.collect()
        };
        Self {
            rows: rows.iter().take(ROWS).map(|row| (row.name.clone(), figures(row))).collect(),
            columns: columns
                .iter()
                .map(|name| name.chars().take(COLUMN_NAME_MAX).collect())
                .collect(),
        }
    }

    /// Returns the width at which no name is shortened.
    pub(super) fn full_width(&self) -> usize {
        1 + self.longest_name() + self.figures_width()
    }

    /// Returns the heading of a table of this width. Returns `None` if there are no latencies.
    pub(super) fn heading(&self, width: usize) -> Option<String> {
        (!self.rows.is_empty()).then(|| self.line("", &self.columns, width))
    }

    /// Returns the rows of a table of this width.
    pub(super) fn rows(&self, width: usize) -> impl Iterator<Item = String> {
        self.rows.iter().map(move |(name, figures)| self.line(name, figures, width))
    }

    fn line(&self, name: &str, figures: &[String], width: usize) -> String {
        let space = width.saturating_sub(1 + self.figures_width());
        let name_width = space.min(self.longest_name().max(NAME_WIDTH));
        let figure_width = self.figure_width();
        let figures = figures.iter().map(|figure| format!("{figure:>figure_width$}"));
        let name = shortened(name, name_width);
        format!(" {name:<name_width$}{}", figures.collect::<String>())
    }

    fn longest_name(&self) -> usize {
        self.rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0)
    }

    fn figures_width(&self) -> usize {
        self.columns.len() * self.figure_width()
    }

    fn figure_width(&self) -> usize {
        let figures = self.rows.iter().flat_map(|(_, figures)| figures);
        let longest = self.columns.iter().chain(figures).map(String::len).max();
        FIGURE_WIDTH.max(1 + longest.unwrap_or(0))
    }
}

/// Leaves out the middle of a name that is too long, because subcommands differ at the end.
fn shortened(name: &str, width: usize) -> String {
    let count = name.chars().count();
    if count <= width {
        return name.to_owned();
    }
    let end = width / 2;
    let start = width.saturating_sub(1 + end);
    let omission = if width > 0 { "…" } else { "" };
    let first: String = name.chars().take(start).collect();
    first + omission + &name.chars().skip(count - end).collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortens_names_in_the_middle() {
        assert_eq!(shortened("command|docs", 12), "command|docs");
        assert_eq!(shortened("command|docs", 8), "com…docs");
        assert_eq!(shortened("command|docs", 5), "co…cs");
        for width in 0..14 {
            let count = shortened("naïve|names", width).chars().count();
            assert_eq!(count, width.min(11), "at {width}");
        }
    }
}
