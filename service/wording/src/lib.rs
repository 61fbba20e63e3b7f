//! Foreign text (names, messages, files) made safe for display: without control characters, and without characters that change
//! the direction of the text beside it.

use std::borrow::Cow;

/// Whether a terminal may obey a character: control characters, separators of lines, and those that set the direction of text.
pub fn is_obeyed(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// A text as one line: control characters are escaped, line breaks too.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, is_obeyed)
}

/// A text of several lines: line breaks and tabs stay, the rest is escaped.
pub fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |character| {
        !matches!(character, '\n' | '\t') && is_obeyed(character)
    })
}

/// The beginning of a text, of so many characters at the most.
pub fn cut(text: &str, characters: usize) -> Cow<'_, str> {
    match text.char_indices().nth(characters) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

/// Most characters of a client's name, a key or a label, as these are kept, repeated and sent to workers.
pub const LONGEST_NAME_CHARACTERS: usize = 256;

/// Why a text is no name: it has characters that terminals obey, or too many.
pub fn name_problem(name: &str) -> Option<String> {
    if name.chars().any(is_obeyed) {
        return Some(
            "has control characters, or such that turn the direction of text: leave them out".to_owned(),
        );
    }
    let characters = name.chars().count();
    (characters > LONGEST_NAME_CHARACTERS)
        .then(|| format!("has {characters} characters; {LONGEST_NAME_CHARACTERS} are the most"))
}

/// A value as JSON in one line. JSON itself does not escape all characters that terminals obey, so these are escaped here.
pub fn json(value: &serde_json::Value) -> String {
    let text = value.to_string();
    if !text.chars().any(is_obeyed) {
        return text;
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match is_obeyed(character) {
            true => shown += &format!("\\u{:04x}", u32::from(character)), // all of them are below U+10000
            false => shown.push(character),
        }
    }
    shown
}

/// A drawing of our own, of several lines: as [`lines`], but our colour codes stay. A foreign name with such a code is drawn in
/// that colour, which is harmless.
pub fn drawing(text: &str) -> String {
    in_colours(text, lines)
}

/// A line of a drawing of our own: as [`one_line`], but our colour codes stay.
pub fn drawn_line(text: &str) -> String {
    in_colours(text, one_line)
}

fn in_colours(text: &str, plain: fn(&str) -> Cow<'_, str>) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\x1b') {
        shown += &plain(&rest[..at]);
        let sequence = colour_at(&rest[at..]);
        match sequence {
            "" => shown += "\\u{1b}",
            colour => shown += colour,
        }
        rest = &rest[at + sequence.len().max(1)..];
    }
    shown + &plain(rest)
}

/// The colour, bold, or end of either with which a text begins, or nothing.
fn colour_at(text: &str) -> &str {
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    for start in ["\x1b[0m", "\x1b[1m", "\x1b[38;5;"] {
        let Some(rest) = text.strip_prefix(start) else {
            continue;
        };
        if start.ends_with('m') {
            return &text[..start.len()];
        }
        let number = digits(rest);
        if (1..=3).contains(&number) && rest[number..].starts_with('m') {
            return &text[..start.len() + number + 1];
        }
    }
    ""
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match is_escaped(character) {
            true => shown.extend(character.escape_default()),
            false => shown.push(character),
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(one_line("a\x1b[2J\nb\u{9b}"), "a\\u{1b}[2J\\nb\\u{9b}");
        assert_eq!(lines("a\tb\n\x07\r"), "a\tb\n\\u{7}\\r");
        assert_eq!(one_line("fdp.\u{202e}gnp"), "fdp.\\u{202e}gnp");
        let value = serde_json::json!({"name": "a\x1b\u{9b}\u{202e}"});
        assert_eq!(json(&value), "{\"name\":\"a\\u001b\\u009b\\u202e\"}");
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&json(&value)).unwrap(),
            value
        );
        assert_eq!(one_line("Grün, 日本 🟥"), "Grün, 日本 🟥");
        assert_eq!(lines("\x1b[31mred"), "\\u{1b}[31mred");
    }

    #[test]
    fn a_name_is_bounded_in_characters() {
        assert_eq!(name_problem(&"ü".repeat(LONGEST_NAME_CHARACTERS)), None);
        let problem = name_problem(&"ü".repeat(LONGEST_NAME_CHARACTERS + 1));
        assert_eq!(problem.as_deref(), Some("has 257 characters; 256 are the most"));
        assert!(name_problem("a\nb").is_some());
    }

    #[test]
    fn a_drawing_keeps_the_colours_of_our_own_and_nothing_else() {
        let bold = "\x1b[1mcuda:0\x1b[0m\n\x1b[38;5;245midle\x1b[0m";
        assert_eq!(drawing(bold), bold);
        assert_eq!(
            drawing("\x1b[8m\x1b]0;owned\x07\x1b[38;5;m\x1b[2J"),
            "\\u{1b}[8m\\u{1b}]0;owned\\u{7}\\u{1b}[38;5;m\\u{1b}[2J"
        );
    }
}
