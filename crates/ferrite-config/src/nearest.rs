//! Finds the known name that a misspelt one probably means.

/// Returns the name that needs the fewest changes to become `wrong`.
pub fn nearest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known.into_iter().min_by_key(|name| distance(name, wrong))
}

/// Returns the name that needs the fewest changes, if it needs at most `most` changes.
pub(crate) fn nearest_within<'a>(
    wrong: &str,
    known: impl IntoIterator<Item = &'a str>,
    most: usize,
) -> Option<&'a str> {
    nearest(wrong, known).filter(|name| distance(name, wrong) <= most)
}

/// Returns how many characters must be inserted, removed, replaced, or swapped with their neighbour
/// to turn `a` into `b`.
pub(crate) fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<_>, Vec<_>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = match (i, j) {
                (0, _) => j,
                (_, 0) => i,
                _ => {
                    let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                    let is_swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                    let swapped = if is_swap { rows[i - 2][j - 2] + 1 } else { usize::MAX };
                    replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1).min(swapped)
                }
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_name_with_the_fewest_changes() {
        let known = ["busy-poll-us", "poll-batch", "rdma-port"];
        assert_eq!(nearest("busy_poll", known), Some("busy-poll-us"));
        assert_eq!(nearest("rdma-prot", known), Some("rdma-port"));
        assert_eq!(nearest("x", []), None);
        assert_eq!(nearest_within("rdma-prot", known, 1), Some("rdma-port"));
        assert_eq!(nearest_within("frobnicate", known, 3), None);
        assert_eq!([distance("", "abc"), distance("kitten", "sitting")], [3, 3]);
    }
}
