//! Grants: memory that one side lets the other access, and how each side learns that a grant has
//! ended.
//!
//! ```text
//!   owner                      peer
//!     │ revokes ── Revoke ─────► │ fails operations that have not begun, waits for the others
//!     │ ◄───────── Revoked ───── │
//!     released
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::wire::Control;

/// Maximum number of the peer's revoked grants to remember. Beyond that, this side forgets the
/// lowest numbers, and only the peer refuses the use of those grants. Also the maximum number of
/// the peer's grants whose new address is remembered.
const REVOKED_MAX: usize = 1 << 16;
/// Maximum number of our revocations without an answer. Further ones wait.
const UNANSWERED_MAX: usize = 64;

/// The state of grants in both directions.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    /// The peer's revoked grants.
    revoked: BTreeSet<u64>,
    /// The peer's revoked grants whose revocation this side has not confirmed yet.
    in_use: Vec<u64>,
    /// Addresses and keys of the peer's grants on the current device, if they differ from those in
    /// the tokens.
    moved: BTreeMap<u64, (u64, u32)>,
    /// Our revocations that were not sent yet.
    to_revoke: VecDeque<u64>,
    /// Our revocations that were sent and have no answer.
    unanswered: Vec<u64>,
    /// Our grants that the peer has released, until the driver takes them.
    released: Vec<u64>,
}

impl Grants {
    /// Revokes a grant of ours. Returns the next revocation to send now, if any. If too many
    /// revocations are unanswered, this revocation waits until the peer has answered one, and
    /// [`Grants::next_revocation`] then returns it.
    pub(crate) fn revoke(&mut self, grant: u64) -> Option<Control> {
        self.to_revoke.push_back(grant);
        self.next_revocation()
    }

    /// Returns the next revocation that may be sent.
    pub(crate) fn next_revocation(&mut self) -> Option<Control> {
        if self.unanswered.len() >= UNANSWERED_MAX {
            return None;
        }
        let grant = self.to_revoke.pop_front()?;
        self.unanswered.push(grant);
        Some(Control::Revoke(grant))
    }

    /// Returns the revocations that must be sent again on a new path.
    pub(crate) fn unanswered(&self) -> impl Iterator<Item = Control> {
        self.unanswered.iter().map(|grant| Control::Revoke(*grant))
    }

    /// Notes that the peer has released a grant of ours.
    pub(crate) fn on_released(&mut self, grant: u64) {
        self.released.push(grant);
        self.unanswered.retain(|unanswered| *unanswered != grant);
    }

    pub(crate) fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    pub(crate) fn take_released(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.released)
    }

    /// Notes that the peer has revoked a grant. Returns whether that is new.
    pub(crate) fn on_revoked(&mut self, grant: u64) -> bool {
        if self.revoked.len() >= REVOKED_MAX {
            self.revoked.pop_first();
        }
        self.in_use.push(grant);
        self.revoked.insert(grant)
    }

    pub(crate) fn is_revoked(&self, grant: u64) -> bool {
        self.revoked.contains(&grant)
    }

    /// Returns the number of the peer's revocations without an answer.
    pub(crate) fn waiting(&self) -> usize {
        self.in_use.len()
    }

    /// Confirms the revoked grants that no operation uses any more.
    pub(crate) fn answer(
        &mut self,
        controls: &mut VecDeque<Control>,
        is_used: impl Fn(u64) -> bool,
    ) {
        self.in_use.retain(|grant| {
            let used = is_used(*grant);
            if !used {
                controls.push_back(Control::Revoked(*grant));
            }
            used
        });
    }

    /// Notes the address and the key of a grant of the peer on the next device. Returns false if
    /// the peer reports more than [`REVOKED_MAX`] grants.
    pub(crate) fn on_moved(&mut self, grant: u64, base: u64, rkey: u32) -> bool {
        let fits = self.moved.len() < REVOKED_MAX || self.moved.contains_key(&grant);
        if fits {
            self.moved.insert(grant, (base, rkey));
        }
        fits
    }

    /// Returns the current address and key of a grant of the peer, if they differ from those in its
    /// token.
    pub(crate) fn place_of(&self, grant: u64) -> Option<(u64, u32)> {
        self.moved.get(&grant).copied()
    }

    /// Drops the revocations that wait to be sent or confirmed, because the link is down.
    pub(crate) fn end(&mut self) {
        self.in_use.clear();
        self.to_revoke.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_the_revocations_without_an_answer() {
        let mut grants = Grants::default();
        let told = (0..100).filter_map(|grant| grants.revoke(grant)).count();
        assert_eq!(told, UNANSWERED_MAX);
        grants.on_released(0);
        assert_eq!(grants.next_revocation(), Some(Control::Revoke(64)));
        assert_eq!(grants.next_revocation(), None);
        assert_eq!((grants.unanswered().count(), grants.take_released()), (64, vec![0]));
        assert!(!grants.has_released());
    }

    #[test]
    fn answers_when_nothing_uses_the_grant_any_more() {
        let (mut grants, mut controls) = (Grants::default(), VecDeque::new());
        assert!(grants.on_revoked(7));
        grants.answer(&mut controls, |grant| grant == 7);
        assert!(controls.is_empty() && grants.waiting() == 1 && grants.is_revoked(7));
        assert!(!grants.on_revoked(7), "the peer repeats it on another path");
        grants.answer(&mut controls, |_| false);
        assert_eq!(controls, [Control::Revoked(7), Control::Revoked(7)]);
        assert_eq!(grants.waiting(), 0);
    }

    #[test]
    fn a_peer_cannot_make_it_keep_more_than_a_limit() {
        let mut grants = Grants::default();
        assert!((0..REVOKED_MAX as u64).all(|grant| grants.on_moved(grant, 0, 0)));
        assert!(!grants.on_moved(REVOKED_MAX as u64, 0, 0));
        assert!(grants.on_moved(5, 1, 2), "a known grant moves again");
        assert_eq!(grants.place_of(5), Some((1, 2)));
        (0..=REVOKED_MAX as u64).for_each(|grant| _ = grants.on_revoked(grant));
        assert!(!grants.is_revoked(0) && grants.is_revoked(1));
    }
}
