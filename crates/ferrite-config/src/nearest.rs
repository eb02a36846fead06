//! Finds the known name that a misspelt one probably means.

/// Returns the name that needs the fewest changes to become `wrong`.
pub fn nearest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known.into_iter().min_by_key(|name| distance(name, wrong))
}

/// Returns how many characters to insert, remove or replace (Levenshtein distance).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row.last().copied().unwrap_or_default()
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
        assert_eq!([distance("", "abc"), distance("kitten", "sitting")], [3, 3]);
    }
}
