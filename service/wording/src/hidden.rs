//! Which characters of a text deceive who reads it: a terminal obeys them, nobody sees them, or they cover what is beside them.
//! Characters that are invisible by themselves but shape what is beside them (in emoji, Persian, Hindi) are left where they do so.

use icu_properties::props::{
    BidiControl, BinaryProperty, CanonicalCombiningClass, DefaultIgnorableCodePoint, Emoji, EmojiModifier,
    EnumeratedProperty, ExtendedPictographic, GeneralCategory, GeneralCategoryGroup, Ideographic,
    JoinControl, JoiningType, PrependedConcatenationMark, VariationSelector,
};

/// Most marks on one character: no written language has more of them, and more reach into the lines beside.
const MOST_MARKS: usize = 4;

const ZERO_WIDTH_JOINER: char = '\u{200d}';
const KEYCAP: char = '\u{20e3}';

/// Why a character of a text is not shown as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hidden {
    /// Terminals obey it: control characters, separators of lines, and those that turn the direction of text.
    Obeyed,
    /// It is invisible.
    Unseen,
    /// It is a mark without a character below it, or one of too many.
    Stacked,
}

/// The characters of a text, and which of them are hidden.
pub(crate) fn hidden(text: &str) -> impl Iterator<Item = (char, Option<Hidden>)> {
    let mut before = Before::default();
    let mut rest = text.chars();
    std::iter::from_fn(move || {
        let character = rest.next()?;
        let reason = before.reason(character, rest.clone().next());
        before.add(character, reason);
        Some((character, reason))
    })
}

/// What stands before a character of a text.
#[derive(Default)]
struct Before {
    /// The last character. None at the beginning.
    last: Option<char>,
    /// The last character that is no mark, if a mark after it stands on it.
    base: Option<char>,
    /// Marks on that character.
    marks: usize,
}

impl Before {
    fn reason(&self, character: char, next: Option<char>) -> Option<Hidden> {
        if is_obeyed(character) {
            return Some(Hidden::Obeyed);
        }
        if character.is_ascii() {
            return None;
        }
        if is_invisible(character) && !self.is_shaped(character, next) {
            return Some(Hidden::Unseen);
        }
        let is_stacked = is_mark(character) && (self.base.is_none() || self.marks >= MOST_MARKS);
        is_stacked.then_some(Hidden::Stacked)
    }

    /// Whether an invisible character changes how those beside it look.
    fn is_shaped(&self, character: char, next: Option<char>) -> bool {
        let Some(last) = self.last else {
            return false;
        };
        if VariationSelector::for_char(character) {
            // Digits are emoji too, of which the selector makes keys.
            let is_emoji = Emoji::for_char(last) && (!last.is_ascii() || next == Some(KEYCAP));
            return is_emoji || Ideographic::for_char(last);
        }
        if !JoinControl::for_char(character) {
            return false;
        }
        let pictures = |next| {
            let is_part = ExtendedPictographic::for_char(last)
                || EmojiModifier::for_char(last)
                || VariationSelector::for_char(last);
            character == ZERO_WIDTH_JOINER && is_part && ExtendedPictographic::for_char(next)
        };
        // The rules for internationalized names (RFC 5892, A.1 and A.2).
        let letters = |next| {
            let base = JoiningType::for_char(self.base.unwrap_or(last));
            let joins_next = [JoiningType::DualJoining, JoiningType::LeftJoining].contains(&base);
            let next = JoiningType::for_char(next);
            let joins_last = [JoiningType::DualJoining, JoiningType::RightJoining].contains(&next);
            character != ZERO_WIDTH_JOINER && joins_next && joins_last
        };
        let is_virama = CanonicalCombiningClass::for_char(last) == CanonicalCombiningClass::Virama;
        is_virama || next.is_some_and(|next| pictures(next) || letters(next))
    }

    fn add(&mut self, character: char, reason: Option<Hidden>) {
        self.last = Some(character);
        match reason {
            // What is left out or escaped carries no marks.
            Some(Hidden::Obeyed | Hidden::Unseen) => self.base = None,
            Some(Hidden::Stacked) => {}
            None if is_mark(character) => self.marks += 1,
            None if is_invisible(character) => {}
            None => {
                self.base = (!character.is_whitespace()).then_some(character);
                self.marks = 0;
            }
        }
    }
}

fn is_obeyed(character: char) -> bool {
    let separates = GeneralCategoryGroup::LineSeparator.union(GeneralCategoryGroup::ParagraphSeparator);
    character.is_control()
        || (!character.is_ascii()
            && (BidiControl::for_char(character) || separates.contains(GeneralCategory::for_char(character))))
}

fn is_invisible(character: char) -> bool {
    let is_format = GeneralCategory::for_char(character) == GeneralCategory::Format;
    DefaultIgnorableCodePoint::for_char(character)
        || (is_format && !PrependedConcatenationMark::for_char(character))
}

/// Whether a character is drawn over or around the one before it. Selectors are not, although they are in the same category.
fn is_mark(character: char) -> bool {
    let drawn_over = GeneralCategoryGroup::NonspacingMark.union(GeneralCategoryGroup::EnclosingMark);
    drawn_over.contains(GeneralCategory::for_char(character))
        && !DefaultIgnorableCodePoint::for_char(character)
}

/// Whether a character is a space that is not the ordinary one, or looks like one.
pub(crate) fn is_odd_space(character: char) -> bool {
    const BLANK_OF_BRAILLE: char = '\u{2800}';
    let is_space = GeneralCategory::for_char(character) == GeneralCategory::SpaceSeparator;
    (is_space && character != ' ') || character == BLANK_OF_BRAILLE
}
