//! Splits the bytes of a burst into pieces.

use ferrite_testkit::Random;

use super::Generator;
use crate::commands::chance;
use crate::session::{Action, Part};

/// If one raw part of a burst is longer than this, the burst is often split within the header of a
/// command.
const LONG_COMMAND: usize = 4000;

impl Generator {
    /// Sends bytes in one or more pieces, with or without waiting in between. If a header is split,
    /// it is the header of the command at `focus`.
    pub(super) fn send_in_pieces(
        &mut self,
        client: usize,
        parts: Vec<Part>,
        wait_ms: u64,
        focus: usize,
    ) {
        // The header of a command with many words is often sent first.
        let is_long =
            parts.iter().any(|part| matches!(part, Part::Raw(bytes) if bytes.len() > LONG_COMMAND));
        let rests = chance(&mut self.random, if is_long { 90 } else { 70 });
        let cuts = match self.random.below(4) {
            0..3 if is_long && rests => self.head_cuts(&parts, focus),
            _ => self.cuts(&parts, rests, focus),
        };
        let mut pieces = cut(parts, &cuts).into_iter().peekable();
        while let Some(parts) = pieces.next() {
            let is_last = pieces.peek().is_none();
            let wait_ms = if is_last { wait_ms } else { 0 };
            let settle = is_last || rests;
            self.queue(client, Action::Write { parts, settle, wait_ms, returns_id: false });
        }
    }

    /// Returns positions after `*N`, after `$N` of the name, after the name, or all of them.
    fn head_cuts(&mut self, parts: &[Part], focus: usize) -> Vec<usize> {
        let Some(Part::Raw(first)) = parts.first() else { return Vec::new() };
        let ends = first.iter().enumerate().skip(focus).filter(|(_, byte)| **byte == b'\n');
        let ends: Vec<_> = ends.map(|(at, _)| at + 1).take(3).collect();
        match self.random.below(7) {
            0..4 => ends.first().copied().into_iter().collect(),
            4 => ends.get(1).copied().into_iter().collect(),
            5 => ends.get(2).copied().into_iter().collect(),
            _ => ends,
        }
    }

    /// Returns where to split the first part, which is raw.
    fn cuts(&mut self, parts: &[Part], rests: bool, focus: usize) -> Vec<usize> {
        let Some(Part::Raw(first)) = parts.first() else { return Vec::new() };
        let len = first.len() as u64;
        match self.random.below(20) {
            0..7 => self.head_cuts(parts, focus),
            7 if len < 60 => (1..first.len()).collect(),
            8 if len < 300 && !rests => (1..first.len()).collect(),
            9..12 => {
                let cut = |random: &mut Random| 1 + random.below(len.max(2) - 1) as usize;
                let mut cuts: Vec<_> =
                    (0..=self.random.below(3)).map(|_| cut(&mut self.random)).collect();
                cuts.sort_unstable();
                cuts.dedup();
                cuts
            }
            // Before the last line end and within it.
            12 => vec![first.len().saturating_sub(2), first.len().saturating_sub(1)],
            _ => Vec::new(),
        }
    }
}

/// Splits the parts at these positions. Client ids are never split.
fn cut(parts: Vec<Part>, cuts: &[usize]) -> Vec<Vec<Part>> {
    let mut parts = parts.into_iter();
    let Some(Part::Raw(mut first)) = parts.next() else { return Vec::new() };
    let mut pieces = Vec::new();
    for cut in cuts.iter().rev().filter(|cut| **cut > 0) {
        if *cut < first.len() {
            pieces.push(vec![Part::Raw(first.split_off(*cut))]);
        }
    }
    pieces.push(vec![Part::Raw(first)]);
    pieces.reverse();
    if let Some(last) = pieces.last_mut() {
        last.extend(parts);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_add_up_to_the_whole() {
        let whole =
            vec![Part::Raw(b"*2\r\n$4\r\nPING".to_vec()), Part::Id(1), Part::Raw(b"x".to_vec())];
        let pieces = cut(whole.clone(), &[4, 8]);
        assert_eq!(pieces.len(), 3);
        assert_eq!(pieces[0], [Part::Raw(b"*2\r\n".to_vec())]);
        let joined: usize =
            pieces.iter().flatten().filter(|part| matches!(part, Part::Raw(_))).count();
        assert_eq!(joined, 4);
        assert_eq!(pieces[2][1..], whole[1..]);
    }
}
