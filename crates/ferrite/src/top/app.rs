//! The state of the screen, and what keys do to it. This module neither draws nor reads from a
//! source.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::snapshot::{Rates, Session, Snapshot};

/// A column to sort by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    OutRate,
    InRate,
    Out,
    In,
    Held,
    Age,
    Address,
    Id,
}

impl Sort {
    const ALL: [Self; 8] = [
        Self::OutRate,
        Self::InRate,
        Self::Out,
        Self::In,
        Self::Held,
        Self::Age,
        Self::Address,
        Self::Id,
    ];

    fn next(self) -> Self {
        let index = Self::ALL.iter().position(|sort| *sort == self).unwrap_or(0);
        Self::ALL[(index + 1) % Self::ALL.len()]
    }
}

/// The part of the screen that receives the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Table,
    /// Keys change the filter.
    Filter,
    Details,
    /// Asks the user before killing this session.
    ConfirmKill(u64),
}

/// What the program must do after a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    None,
    Quit,
    Kill(u64),
}

/// The state of the screen.
pub(super) struct App {
    pub(super) address: String,
    pub(super) snapshot: Option<Snapshot>,
    pub(super) rates: Rates,
    /// Why the last attempt to read the state failed.
    pub(super) error: Option<String>,
    /// The progress or the result of the last kill.
    pub(super) message: Option<String>,
    pub(super) sort: Sort,
    pub(super) is_reversed: bool,
    pub(super) is_paused: bool,
    pub(super) filter: String,
    pub(super) mode: Mode,
    /// The id of the selected session. The session stays selected when the order changes.
    pub(super) selected: Option<u64>,
    /// Index of the box that is drawn first, modulo the number of boxes. A small terminal has no
    /// space for all of them.
    pub(super) first_box: usize,
    /// Index of the first counter that is shown, in the order of [`App::counters`].
    pub(super) first_counter: usize,
}

impl App {
    pub(super) fn new(address: String) -> Self {
        Self {
            address,
            snapshot: None,
            rates: Rates::default(),
            error: None,
            message: None,
            sort: Sort::OutRate,
            is_reversed: false,
            is_paused: false,
            filter: String::new(),
            mode: Mode::Table,
            selected: None,
            first_box: 0,
            first_counter: 0,
        }
    }

    /// Takes a new state, or the reason why there is none. If there is no new state, or during a
    /// pause, the last state stays on the screen.
    pub(super) fn update(&mut self, polled: anyhow::Result<Snapshot>) {
        match polled {
            Err(error) => self.error = Some(format!("{error:#}")),
            Ok(_) if self.is_paused => self.error = None,
            Ok(snapshot) => {
                if let Some(before) = &self.snapshot {
                    self.rates = Rates::between(before, &snapshot);
                }
                self.snapshot = Some(snapshot);
                self.error = None;
                self.keep_selection();
            }
        }
    }

    /// Returns the sessions that match the filter, in order.
    pub(super) fn sessions(&self) -> Vec<&Session> {
        let all = self.snapshot.iter().flat_map(|snapshot| &snapshot.sessions).flatten();
        let mut sessions: Vec<_> = all.filter(|session| self.matches(session)).collect();
        let rate = |session: &Session| self.rates.session(session.id);
        sessions.sort_by(|one, other| {
            // Sorts rates, sizes and ages with the largest first. Equal rows are in the order of
            // their ids, so that they do not change places.
            let order = match self.sort {
                Sort::OutRate => rate(other).1.cmp(&rate(one).1),
                Sort::InRate => rate(other).0.cmp(&rate(one).0),
                Sort::Out => other.out_bytes.cmp(&one.out_bytes),
                Sort::In => other.in_bytes.cmp(&one.in_bytes),
                Sort::Held => other.held_bytes.cmp(&one.held_bytes),
                Sort::Age => other.age_s.cmp(&one.age_s),
                Sort::Address => one.address.cmp(&other.address),
                Sort::Id => one.id.cmp(&other.id),
            };
            order.then(one.id.cmp(&other.id))
        });
        if self.is_reversed {
            sessions.reverse();
        }
        sessions
    }

    /// Returns the counters of devices that match the filter, each with its value and its rate. The
    /// counter with the highest rate comes first.
    pub(super) fn counters(&self) -> Vec<(&str, u64, u64)> {
        let filter = self.filter.to_lowercase();
        let all = self.snapshot.iter().flat_map(|snapshot| &snapshot.devices);
        let matching = all.filter(|(name, _)| name.to_lowercase().contains(&filter));
        let mut counters: Vec<_> = matching
            .map(|(name, value)| (name.as_str(), *value, self.rates.device(name)))
            .collect();
        counters.sort_by_key(|(name, _, rate)| (std::cmp::Reverse(*rate), *name));
        counters
    }

    /// Returns whether the filter is a part of the session's address, user, transport, device or
    /// path, or equals its id.
    fn matches(&self, session: &Session) -> bool {
        let Session { id, address, user, transport, device, path, .. } = session;
        let filter = self.filter.to_lowercase();
        let texts = [address, user, transport, device, path];
        let has = |text: &String| text.to_lowercase().contains(&filter);
        texts.into_iter().any(has) || id.to_string() == filter
    }

    pub(super) fn selected_session(&self) -> Option<&Session> {
        let selected = self.selected?;
        self.snapshot.as_ref()?.sessions.iter().flatten().find(|session| session.id == selected)
    }

    /// Selects the first session if the selected one is gone or does not match the filter. Keeps
    /// the selection while a box shows the details of the selected session or asks whether to kill
    /// it.
    fn keep_selection(&mut self) {
        let sessions = self.sessions();
        if sessions.iter().any(|session| Some(session.id) == self.selected) {
            return;
        }
        let first = sessions.first().map(|session| session.id);
        if self.mode == Mode::Table || self.mode == Mode::Filter {
            self.selected = first;
        }
    }

    fn move_selection(&mut self, by: isize) {
        if self.snapshot.as_ref().is_some_and(|snapshot| snapshot.sessions.is_none()) {
            let last = self.counters().len().saturating_sub(1);
            self.first_counter = self.first_counter.saturating_add_signed(by).min(last);
            return;
        }
        let sessions = self.sessions();
        let at = sessions.iter().position(|session| Some(session.id) == self.selected);
        let at = at.map_or(0, |at| at.saturating_add_signed(by));
        let selected = sessions.get(at).or(sessions.last()).map(|session| session.id);
        self.selected = selected;
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Action {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Action::Quit;
        }
        match self.mode {
            Mode::Table => return self.press_in_table(key.code),
            Mode::Filter => self.press_in_filter(key.code),
            Mode::Details => match key.code {
                KeyCode::Char('k') => self.ask_to_kill(),
                KeyCode::Char('q') => return Action::Quit,
                KeyCode::Esc | KeyCode::Enter => self.mode = Mode::Table,
                _ => {}
            },
            Mode::ConfirmKill(id) => {
                self.mode = Mode::Table;
                if matches!(key.code, KeyCode::Char('y' | 'Y')) {
                    return Action::Kill(id);
                }
                self.message = Some("not killed".into());
            }
        }
        Action::None
    }

    fn press_in_table(&mut self, key: KeyCode) -> Action {
        self.message = None;
        match key {
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Up => self.move_selection(-1),
            KeyCode::Down => self.move_selection(1),
            KeyCode::PageUp => self.move_selection(-10),
            KeyCode::PageDown => self.move_selection(10),
            KeyCode::Home => self.move_selection(isize::MIN),
            KeyCode::End => self.move_selection(isize::MAX),
            KeyCode::Tab => self.first_box += 1,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
            KeyCode::Char('p') => self.is_paused = !self.is_paused,
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Esc => {
                self.filter.clear();
                self.keep_selection();
            }
            KeyCode::Enter if self.selected_session().is_some() => self.mode = Mode::Details,
            KeyCode::Char('k') => self.ask_to_kill(),
            _ => {}
        }
        Action::None
    }

    fn press_in_filter(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.mode = Mode::Table,
            KeyCode::Esc => {
                self.filter.clear();
                self.mode = Mode::Table;
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(c) => self.filter.push(c),
            _ => {}
        }
        self.keep_selection();
    }

    fn ask_to_kill(&mut self) {
        if let Some(session) = self.selected_session() {
            self.mode = Mode::ConfirmKill(session.id);
        }
    }
}
