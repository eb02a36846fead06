//! The links of a fabric, by number.

use std::sync::Arc;

use crate::device::slots::OWNER_MAX;
use crate::link::LinkStats;
use crate::link::name::LinkName;
use crate::link::shared::LinkShared;

#[derive(Default)]
pub(crate) struct Links {
    places: Vec<Place>,
    free: Vec<u32>,
    next_serial: u64,
    /// Totals of the links that are gone.
    pub(crate) retired: LinkStats,
}

#[derive(Default)]
struct Place {
    link: Option<Arc<LinkShared>>,
    /// The first generation of the next link's slots. It ensures that a late completion of an
    /// earlier link matches no slot.
    next_generation: u32,
}

impl Links {
    /// Reserves a number for a new link. Returns its name and the first generation of its slots.
    /// The caller creates the link and stores it with [`Links::put`].
    pub(crate) fn reserve(&mut self) -> Option<(LinkName, u32)> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.places.len() <= OWNER_MAX as usize => {
                self.places.push(Place::default());
                (self.places.len() - 1) as u32
            }
            None => return None,
        };
        self.next_serial += 1;
        let name = LinkName { index, serial: self.next_serial };
        Some((name, self.places[index as usize].next_generation))
    }

    pub(crate) fn put(&mut self, index: u32, link: Arc<LinkShared>) {
        self.places[index as usize].link = Some(link);
    }

    pub(crate) fn get(&self, index: u32) -> Option<&Arc<LinkShared>> {
        self.places.get(index as usize)?.link.as_ref()
    }

    /// Removes a link whose queue pair is gone.
    pub(crate) fn remove(&mut self, index: u32) -> Option<Arc<LinkShared>> {
        let place = self.places.get_mut(index as usize)?;
        let link = place.link.take()?;
        let (next, stats) = link.with(|state, _, _| (state.next_generation(), state.core.stats));
        place.next_generation = next;
        self.retired.add(&stats);
        self.free.push(index);
        Some(link)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<LinkShared>> {
        self.places.iter().filter_map(|place| place.link.as_ref())
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }
}
