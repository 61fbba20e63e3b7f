//! The model of a card: the figures that the driver would report. It knows nothing of the ledger. Where memory is not remapped, each
//! allocation needs a hole, as the driver of a simulated card has it.

use std::collections::BTreeMap;

use residency::{Bytes, Component, ComponentId, DriverTruth, Layout, Millis, Owner, Part, Range};

pub(crate) struct Card {
    pub(crate) total: Bytes,
    pub(crate) context: Bytes,
    pub(crate) workspaces: Bytes,
    pub(crate) slack: Bytes,
    pub(crate) scratch: Bytes,
    pub(crate) foreign: Bytes,
    pub(crate) components: BTreeMap<ComponentId, Bytes>,
    /// Freed, not shown as free until then.
    late: Vec<(Bytes, Millis, Vec<Range>)>,
    /// Where everything lies, if memory is not remapped.
    pub(crate) layout: Option<Layout>,
}

impl Card {
    pub(crate) fn new(total: Bytes, context: Bytes, workspaces: Bytes) -> Card {
        let zero = Bytes::ZERO;
        let (components, late) = (BTreeMap::new(), Vec::new());
        Card {
            total,
            context,
            workspaces,
            slack: zero,
            scratch: zero,
            foreign: zero,
            components,
            late,
            layout: None,
        }
    }

    /// The same card, whose memory is not remapped.
    pub(crate) fn without_remapping(mut self) -> Card {
        let mut layout = Layout::new(self.total);
        layout.fill(&Range {
            at: 0,
            bytes: self.context + self.workspaces,
            owner: Owner::Fixed,
        });
        self.layout = Some(layout);
        self
    }

    pub(crate) fn in_components(&self) -> Bytes {
        self.components.values().copied().sum()
    }

    pub(crate) fn late(&self) -> Bytes {
        self.late.iter().map(|(bytes, ..)| *bytes).sum()
    }

    pub(crate) fn free(&self) -> Bytes {
        let ours = self.context + self.workspaces + self.slack + self.scratch + self.in_components();
        let taken = ours + self.foreign + self.late();
        assert!(
            taken <= self.total,
            "the model itself is wrong: {taken} of {} taken",
            self.total
        );
        self.total - taken
    }

    pub(crate) fn truth(&mut self) -> DriverTruth {
        self.let_others_take();
        DriverTruth {
            layout: self.layout.clone(),
            ..self.figures()
        }
    }

    /// The driver's figures, without what lies where.
    pub(crate) fn figures(&self) -> DriverTruth {
        DriverTruth {
            total: self.total,
            free: self.free(),
            components: self.in_components(),
            scratch: self.scratch,
            slack: self.slack,
            workspaces: self.workspaces,
            context: self.context,
            ..DriverTruth::default()
        }
    }

    fn let_others_take(&mut self) {
        if let Some(layout) = &mut self.layout {
            layout.set_foreign(self.foreign);
        }
    }

    pub(crate) fn tick(&mut self, now: Millis) {
        let (late, due) = std::mem::take(&mut self.late)
            .into_iter()
            .partition(|(_, until, _)| *until > now);
        self.late = late;
        if let Some(layout) = &mut self.layout {
            let due: Vec<Range> = due
                .into_iter()
                .flat_map(|(.., ranges): (_, _, Vec<Range>)| ranges)
                .collect();
            layout.free(|range| due.contains(range));
        }
    }

    /// Component pools take from the driver's free memory only.
    pub(crate) fn allocate(&mut self, component: &Component, part: Part, bytes: Bytes) -> bool {
        self.let_others_take();
        let fits = bytes <= self.free();
        let layout = self.layout.as_mut();
        let fits = fits && layout.is_none_or(|layout| layout.hold(component, part).is_ok());
        if fits {
            *self.components.entry(component.id.clone()).or_default() += bytes;
        }
        fits
    }

    pub(crate) fn release(&mut self, id: &ComponentId, shown_at: Option<Millis>) {
        let layout = self.layout.as_mut();
        let freed = layout.map_or_else(Vec::new, |layout| layout.free_component(id));
        if let Some(bytes) = self.components.remove(id) {
            self.show_later(bytes, shown_at, &freed);
        }
    }

    /// A component keeps a smaller part. False if that needs an allocation for which there is no hole.
    pub(crate) fn shrink(&mut self, component: &Component, part: Part, shown_at: Option<Millis>) -> bool {
        let mut freed = Vec::new();
        self.let_others_take();
        if let Some(layout) = &mut self.layout {
            let before = layout.clone();
            if layout.hold(component, part).is_err() {
                return false;
            }
            let gone = before
                .used()
                .iter()
                .filter(|range| !layout.used().contains(range));
            freed = gone.cloned().collect();
        }
        self.give_up(&component.id, component.bytes_of(part), shown_at, &freed);
        true
    }

    /// A component that was to grow has all but `left` bytes taken back.
    pub(crate) fn take_back(&mut self, id: &ComponentId, left: Bytes, shown_at: Option<Millis>) {
        self.give_up(id, left, shown_at, &[]);
    }

    fn give_up(&mut self, id: &ComponentId, left: Bytes, shown_at: Option<Millis>, freed: &[Range]) {
        if let Some(bytes) = self.components.get_mut(id) {
            let gone = *bytes - left;
            *bytes = left.min(*bytes);
            self.show_later(gone, shown_at, freed);
        }
    }

    fn show_later(&mut self, bytes: Bytes, shown_at: Option<Millis>, freed: &[Range]) {
        let Some(at) = shown_at.filter(|_| bytes > Bytes::ZERO) else {
            return;
        };
        let Some(layout) = &mut self.layout else {
            self.late.push((bytes, at, Vec::new()));
            return;
        };
        let late = freed.iter().map(|range| Range {
            owner: Owner::Late,
            ..range.clone()
        });
        let filled: Vec<Range> = late.flat_map(|range| layout.fill(&range)).collect();
        let bytes = filled.iter().map(|range| range.bytes).sum();
        self.late.push((bytes, at, filled));
    }

    /// Activations take slack first, then the driver's free memory; in one piece, where memory is not remapped.
    pub(crate) fn take_scratch(&mut self, bytes: Bytes) -> bool {
        self.let_others_take();
        if bytes > self.free() + self.slack {
            return false;
        }
        let from_slack = match &mut self.layout {
            None => bytes,
            Some(layout) => match layout.take_scratch(bytes) {
                Ok((_, true)) => bytes,
                Ok((_, false)) => Bytes::ZERO,
                Err(_) => return false,
            },
        };
        self.slack -= from_slack; // saturates: bytes that slack lacks come from the free bytes
        self.scratch += bytes;
        true
    }

    pub(crate) fn give_scratch_back(&mut self, bytes: Bytes) {
        self.scratch -= bytes;
        self.slack += bytes;
        if let Some(layout) = &mut self.layout {
            let mut used = layout.used().iter();
            let is_it = |range: &&Range| range.owner == Owner::Scratch && range.bytes == bytes;
            if let Some(at) = used.find(is_it).map(|range| range.at) {
                layout.return_scratch(at, true);
            }
        }
    }

    pub(crate) fn trim(&mut self, shown_at: Option<Millis>) {
        let slack = std::mem::take(&mut self.slack);
        let layout = self.layout.as_mut();
        let freed = layout.map_or_else(Vec::new, |layout| {
            layout.free(|range| range.owner == Owner::Slack)
        });
        self.show_later(slack, shown_at, &freed);
    }
}
