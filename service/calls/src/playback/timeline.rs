//! One endless track of segments: which segment plays, and how one fades into the next.
//!
//! A segment is expected from its request on, arrives piece by piece, and plays in its turn. A segment that starts when
//! the earlier ones are over waits for them. An immediate segment starts as soon as enough of it has arrived, and
//! supersedes earlier segments that have not played. The segment before is kept until the new one is complete: if the
//! new one fails before, the old one continues.

use std::collections::BTreeMap;

use model::{MediaFormat, Piece};

use super::take::Take;

/// When a segment begins to sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentStart {
    /// When the earlier segments are over.
    WhenOver,
    /// As soon as enough of it has arrived, at the position of the segment that sounds.
    AtOnce,
    /// As soon as enough of it has arrived, from its beginning.
    AtOnceFromStart,
}

/// How a session plays. Lengths are in samples for each channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaybackSettings {
    pub samples_per_second: u32,
    pub channels: u32,
    /// How far ahead of the play head sound is rendered.
    pub lead: u64,
    /// How long a segment fades into the next.
    pub crossfade: u64,
    /// Whether a segment is repeated when it is over and no other is ready.
    pub repeats: bool,
}

/// Sound of one segment, or of one that fades into it.
#[derive(Debug, PartialEq)]
pub struct Rendered {
    /// Position of its first sample in the session.
    pub first: u64,
    pub segment: u32,
    /// Position of its first sample in the segment.
    pub first_of_segment: u64,
    /// 16 bits, little-endian, channels interleaved.
    pub samples: Vec<u8>,
}

/// The change of the other segments when one begins to sound.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Change {
    /// Segments that will never sound, because a later one has begun.
    pub superseded: Vec<u32>,
}

/// A place in a segment that sounds.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    segment: u32,
    /// Next sample.
    at: u64,
    /// Whether the segment has sounded to its end before.
    is_repeated: bool,
}

/// How the segment that sounds fades in.
#[derive(Clone, Copy, Debug)]
struct FadeIn {
    /// Number of rendered samples when the fade began.
    began_at: u64,
    /// The segment's weight at that time: above 0 if it was fading out and continues.
    from: f64,
}

/// A segment that fades out beneath the one that sounds.
#[derive(Debug)]
struct Fade {
    from: Cursor,
    /// Its samples, where its segment is dropped.
    given_up: Option<Take>,
    /// Its weight when it began to fade.
    weight: f64,
    /// Samples until it is silent; at most as many as it has left, and as the segment that sounds has.
    length: u64,
    done: u64,
}

impl Fade {
    /// Whether it fades this segment, and the segment has not failed.
    fn is_of(&self, segment: u32) -> bool {
        self.given_up.is_none() && self.from.segment == segment
    }

    /// The weight of its next sample.
    fn weight(&self) -> f64 {
        self.weight * (1.0 - raised(self.done, self.length))
    }
}

/// The last complete segment that sounded, with the number of rendered samples when another took its place.
#[derive(Clone, Copy, Debug)]
struct Before {
    cursor: Cursor,
    left_at: u64,
}

#[derive(Debug)]
struct Segment {
    start: SegmentStart,
    take: Option<Take>,
}

/// The track that a session plays.
#[derive(Debug)]
pub(crate) struct Timeline {
    settings: PlaybackSettings,
    /// Samples made so far.
    made: u64,
    /// Segments that have not sounded, the one that sounds, and the one before it while it may be needed again.
    segments: BTreeMap<u32, Segment>,
    sounding: Option<Cursor>,
    /// One fade, or several if segments failed while they faded in.
    fades: Vec<Fade>,
    /// The segment that continues if the current one fails; kept until the current one is complete.
    before: Option<Before>,
    /// `None` where no fade was needed.
    fade_in: Option<FadeIn>,
}

impl Timeline {
    /// Without a segment.
    pub(crate) fn new(settings: PlaybackSettings) -> Timeline {
        Timeline {
            settings,
            made: 0,
            segments: BTreeMap::new(),
            sounding: None,
            fades: Vec::new(),
            before: None,
            fade_in: None,
        }
    }

    /// A segment was requested. Numbers ascend.
    pub(crate) fn expect(&mut self, segment: u32, start: SegmentStart) {
        self.segments.insert(segment, Segment { start, take: None });
    }

    /// The position in the segment that sounds, in seconds, at which the next sample will be rendered; 0 where none sounds.
    pub(crate) fn place_seconds(&self) -> f32 {
        let place = self.sounding.map_or(0, |cursor| cursor.at);
        (place as f64 / f64::from(self.settings.samples_per_second.max(1))) as f32
    }

    /// Whether a segment may still sound.
    pub(crate) fn has(&self, segment: u32) -> bool {
        self.segments.contains_key(&segment)
    }

    /// Samples made so far.
    pub(crate) fn made(&self) -> u64 {
        self.made
    }

    /// Whether a segment has begun to sound and is not over: then silence is a gap.
    pub(crate) fn is_within_segment(&self) -> bool {
        self.sounding
            .is_some_and(|cursor| self.settings.repeats || cursor.at < self.length(cursor.segment))
    }

    /// Adds a piece of a segment.
    ///
    /// # Errors
    /// A problem in words, when it is no sound of this session.
    pub(crate) fn add(&mut self, segment: u32, piece: &Piece) -> Result<(), String> {
        let Some(known) = self.segments.get_mut(&segment) else {
            return Ok(()); // superseded
        };
        if known.take.is_none() {
            known.take = Take::of(&piece.format);
            let MediaFormat::Audio {
                samples_per_second,
                channels,
                ..
            } = piece.format
            else {
                return Err("it is no sound".to_owned());
            };
            let settings = &self.settings;
            if (samples_per_second, channels) != (settings.samples_per_second, settings.channels) {
                return Err(format!(
                    "it has {channels} channels of {samples_per_second} samples a second, and the session {} of {}",
                    settings.channels, settings.samples_per_second
                ));
            }
        }
        let take = known.take.as_mut().ok_or("it has no samples")?;
        match take.add(piece) {
            true => Ok(()),
            false => Err("a piece that is not of its track".to_owned()),
        }
    }

    /// The length of a segment, in samples, once it is complete.
    pub(crate) fn whole_length(&self, segment: u32) -> Option<u64> {
        let take = self.segments.get(&segment)?.take.as_ref()?;
        take.is_whole().then(|| take.length())
    }

    /// A segment failed. Where it sounds already, the segment before it continues from the place where it would be.
    pub(crate) fn fail(&mut self, segment: u32) {
        let failed = self.segments.remove(&segment).and_then(|known| known.take);
        let Some(from) = self.sounding.filter(|cursor| cursor.segment == segment) else {
            // The failed segment may still be fading out.
            let fade = self.fades.iter_mut().find(|fade| fade.is_of(segment));
            if let Some(fade) = fade {
                fade.given_up = failed;
            }
            return;
        };
        let weight = failed.as_ref().map_or(1.0, |take| self.weight(from, take));
        self.sounding = self.before.take().and_then(|before| self.resumed(before));
        let Some(resumed) = self.sounding else {
            self.fades.clear();
            self.fade_in = None;
            return;
        };
        let fading = self
            .fades
            .iter()
            .position(|fade| fade.is_of(resumed.segment) && fade.from.at + fade.done == resumed.at);
        let heard = fading.map_or(0.0, |place| self.fades.swap_remove(place).weight());
        let alone = self.weight_near_ends(resumed, self.length(resumed.segment));
        self.fade_in = Some(FadeIn {
            began_at: self.made,
            from: if heard < alone { heard / alone } else { 1.0 },
        });
        let left = failed.as_ref().map_or(0, |take| take.there_from(from.at));
        self.fades.push(Fade {
            from,
            given_up: failed,
            weight,
            length: self.longest_fade(resumed).min(left),
            done: 0,
        });
        // Where the segment before is over too, nothing is rendered that would end it.
        self.end_fades();
    }

    /// Samples that another segment may take to fade out beneath one that sounds from here on. A fade is rendered with that segment
    /// alone, and none begins before it is over: a longer one would end nowhere.
    fn longest_fade(&self, over: Cursor) -> u64 {
        match self.settings.repeats {
            true => self.settings.crossfade,
            false => {
                let left = self.length(over.segment).saturating_sub(over.at);
                self.settings.crossfade.min(left)
            }
        }
    }

    /// The position that the earlier segment would have reached by now.
    fn resumed(&self, before: Before) -> Option<Cursor> {
        let length = self.length(before.cursor.segment);
        let at = before.cursor.at + (self.made - before.left_at);
        let at = match self.settings.repeats {
            true => at.checked_rem(length)?,
            false => at.min(length),
        };
        Some(Cursor { at, ..before.cursor })
    }

    /// Renders the next samples, at most `most`; fewer where a segment begins or ends, `None` where no samples are there.
    pub(crate) fn render(&mut self, most: u64) -> (Option<Rendered>, Change) {
        let change = self.change_segment();
        let Some(cursor) = self.sounding.filter(|_| most > 0) else {
            return (None, change);
        };
        let first = self.made;
        let mut samples = Vec::new();
        let mut made = 0;
        while made < most && self.render_sample(&mut samples) {
            made += 1;
            if self.is_turn_of_next() {
                break;
            }
        }
        if made == 0 {
            return (None, change);
        }
        // At its end a segment is repeated from its beginning.
        let first_of_segment = match self.settings.repeats && cursor.at >= self.length(cursor.segment) {
            true => 0,
            false => cursor.at,
        };
        let rendered = Rendered {
            first,
            segment: cursor.segment,
            first_of_segment,
            samples,
        };
        (Some(rendered), change)
    }

    fn length(&self, segment: u32) -> u64 {
        let take = self.segments.get(&segment).and_then(|known| known.take.as_ref());
        take.map_or(0, Take::length)
    }

    /// Whether enough of a segment has arrived, from a position on, for it to sound.
    fn can_sound(&self, segment: u32, from: u64) -> bool {
        let Some(take) = self.segments.get(&segment).and_then(|known| known.take.as_ref()) else {
            return false;
        };
        // While a segment plays, the next waits for a full lead, so that it does not run out of samples.
        let sounds = |cursor: Cursor| self.settings.repeats || cursor.at < self.length(cursor.segment);
        let enough = match self.sounding.is_some_and(sounds) {
            true => self.settings.lead,
            false => u64::from(self.settings.samples_per_second / 4),
        };
        let enough = enough
            .max(self.settings.crossfade)
            .min(take.length() - from.min(take.length()));
        take.is_whole() || (enough > 0 && take.there_from(from) >= enough)
    }

    /// Where a segment would begin to sound.
    fn entry(&self, segment: u32, start: SegmentStart) -> u64 {
        match (start, self.sounding) {
            (SegmentStart::AtOnce, Some(cursor)) => cursor.at % self.length(segment).max(1),
            _ => 0,
        }
    }

    /// The segment whose turn it is to sound next.
    fn next(&self) -> Option<(u32, SegmentStart)> {
        if !self.fades.is_empty() {
            return None; // one fade at a time: to drop a segment during its fade would be heard as a click
        }
        let sounding = self.sounding.map_or(0, |cursor| cursor.segment);
        let after = || {
            self.segments
                .range(sounding + 1..)
                .map(|(number, known)| (*number, known.start))
        };
        let at_once = after().rev().find(|&(number, start)| {
            start != SegmentStart::WhenOver && self.can_sound(number, self.entry(number, start))
        });
        let (number, start) = at_once.or_else(|| after().next())?;
        let is_turn = start != SegmentStart::WhenOver || self.is_ending();
        (is_turn && self.can_sound(number, self.entry(number, start))).then_some((number, start))
    }

    fn is_turn_of_next(&self) -> bool {
        self.is_ending() && self.next().is_some()
    }

    /// Whether nothing sounds, or only the end of a segment into which the next one fades.
    fn is_ending(&self) -> bool {
        self.sounding.is_none_or(|cursor| {
            let length = self.length(cursor.segment);
            length.saturating_sub(cursor.at) <= self.settings.crossfade.min(length / 2)
        })
    }

    fn change_segment(&mut self) -> Change {
        let Some((number, start)) = self.next() else {
            return Change::default();
        };
        let next = Cursor {
            segment: number,
            at: self.entry(number, start),
            is_repeated: false,
        };
        let (made, before) = (self.made, self.sounding);
        if let Some(cursor) = before {
            let take = self
                .segments
                .get(&cursor.segment)
                .and_then(|known| known.take.as_ref());
            let (weight, left) = take.map_or((1.0, 0), |take| {
                (self.weight(cursor, take), take.there_from(cursor.at))
            });
            self.fades.push(Fade {
                from: cursor,
                given_up: None,
                weight,
                length: self.longest_fade(next).min(left),
                done: 0,
            });
            let is_whole = self.whole_length(cursor.segment).is_some();
            self.before = match self.before.filter(|_| !is_whole) {
                Some(earlier) => Some(earlier),
                None => Some(Before {
                    cursor,
                    left_at: made,
                }),
            };
        }
        self.fade_in = (made > 0).then_some(FadeIn {
            began_at: made,
            from: 0.0,
        });
        self.sounding = Some(next);
        let last = before.map(|cursor| cursor.segment);
        let kept = [last, self.before.map(|before| before.cursor.segment)];
        let earlier: Vec<u32> = self.segments.range(..number).map(|(number, _)| *number).collect();
        let mut superseded = Vec::new();
        for segment in earlier
            .into_iter()
            .filter(|earlier| !kept.contains(&Some(*earlier)))
        {
            self.segments.remove(&segment);
            // A segment that has sounded was reported already.
            if last.is_none_or(|last| segment > last) {
                superseded.push(segment);
            }
        }
        Change { superseded }
    }

    /// Renders one sample of each channel; false where no segment has one.
    fn render_sample(&mut self, samples: &mut Vec<u8>) -> bool {
        let Some(mut cursor) = self.sounding else {
            return false;
        };
        let Some(take) = self
            .segments
            .get(&cursor.segment)
            .and_then(|known| known.take.as_ref())
        else {
            return false;
        };
        if cursor.at >= take.length() {
            if !self.settings.repeats {
                return false;
            }
            cursor = Cursor {
                at: 0,
                is_repeated: true,
                ..cursor
            };
        }
        if take.there_from(cursor.at) == 0 {
            return false;
        }
        let weight = self.weight(cursor, take);
        let under: Vec<_> = self
            .fades
            .iter()
            .filter_map(|fade| {
                let known = self
                    .segments
                    .get(&fade.from.segment)
                    .and_then(|known| known.take.as_ref());
                let old = fade.given_up.as_ref().or(known)?;
                let at = fade.from.at + fade.done;
                (fade.done < fade.length && old.there_from(at) > 0).then(|| (old, at, fade.weight()))
            })
            .collect();
        for channel in 0..self.settings.channels as usize {
            let mut sample = f64::from(take.sample(cursor.at, channel)) * weight;
            for &(old, at, weight) in &under {
                sample += f64::from(old.sample(at, channel)) * weight;
            }
            let sample = sample.round().clamp(f64::from(i16::MIN), f64::from(i16::MAX)) as i16;
            samples.extend_from_slice(&sample.to_le_bytes());
        }
        cursor.at += 1;
        self.sounding = Some(cursor);
        self.made += 1;
        for fade in &mut self.fades {
            fade.done += 1;
        }
        self.end_fades();
        self.forget_before();
        true
    }

    /// The weight of the next sample of the segment that sounds.
    fn weight(&self, cursor: Cursor, take: &Take) -> f64 {
        let crossfade = self.settings.crossfade.min(take.length() / 2);
        let fade_in = self.fade_in.map_or(1.0, |fade| {
            fade.from + (1.0 - fade.from) * raised(self.made - fade.began_at, crossfade)
        });
        fade_in * self.weight_near_ends(cursor, take.length())
    }

    /// The weight of a sample near the ends of a segment that is repeated: it keeps its length, so its ends cannot overlap, and
    /// fade out and in instead.
    fn weight_near_ends(&self, cursor: Cursor, length: u64) -> f64 {
        let fade = (self.settings.crossfade / 2).min(length / 4);
        let to_end = length - cursor.at.min(length);
        let distance = match (self.settings.repeats, cursor.is_repeated) {
            (true, true) => to_end.min(cursor.at + 1),
            (true, false) => to_end,
            (false, _) => return 1.0,
        };
        match distance > fade {
            true => 1.0,
            false => raised(distance.saturating_sub(1), fade),
        }
    }

    /// Drops segments that have faded out, except the one that continues if the current segment fails.
    fn end_fades(&mut self) {
        let before = self.before.map(|before| before.cursor.segment);
        let sounding = self.sounding.map(|cursor| cursor.segment);
        let segments = &mut self.segments;
        self.fades.retain(|fade| {
            let lasts = fade.done < fade.length;
            if !lasts && ![before, sounding].contains(&Some(fade.from.segment)) {
                segments.remove(&fade.from.segment);
            }
            lasts
        });
    }

    /// Drops the earlier segment once the new one is complete and the fade is over.
    fn forget_before(&mut self) {
        let Some(before) = self.before.filter(|_| self.fades.is_empty()) else {
            return;
        };
        let sounding = self.sounding.map(|cursor| cursor.segment);
        if sounding.is_some_and(|segment| self.whole_length(segment).is_some()) {
            self.segments.remove(&before.cursor.segment);
            self.before = None;
        }
    }
}

/// A raised cosine from 0 to 1 over so many samples: no corner at either end.
fn raised(sample: u64, of: u64) -> f64 {
    if sample >= of {
        return 1.0;
    }
    0.5 - 0.5 * (std::f64::consts::PI * (sample as f64 + 0.5) / of as f64).cos()
}

#[cfg(test)]
mod tests;
