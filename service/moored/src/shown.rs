//! Text of others (names, messages, files) as it is shown: nothing that a terminal obeys, or that turns what stands beside it.

use std::borrow::Cow;

/// Whether a terminal may obey a character: control characters, separators of lines, and those that set the direction of text.
pub(crate) fn is_obeyed(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// A text as one line: what a terminal would obey is escaped, line breaks too.
pub(crate) fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, is_obeyed)
}

/// A text of several lines: line breaks and tabs stay, the rest is escaped.
pub(crate) fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |character| {
        !matches!(character, '\n' | '\t') && is_obeyed(character)
    })
}

/// A value as JSON of one line. JSON itself leaves some of what terminals obey as it is.
pub(crate) fn json(value: &serde_json::Value) -> String {
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

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    let mut colour = 0; // bytes of a colour that are still to come: colours are our own, and change nothing else
    for (at, character) in text.char_indices() {
        if character == '\x1b' {
            colour = colour_bytes(&text[at..]);
        }
        if colour > 0 {
            colour -= 1;
            shown.push(character);
            continue;
        }
        match is_escaped(character) {
            true => shown.extend(character.escape_default()),
            false => shown.push(character),
        }
    }
    Cow::Owned(shown)
}

/// How long the sequence is that sets a colour, where a text begins with one; else 0. Each of its characters is a byte.
fn colour_bytes(text: &str) -> usize {
    let Some(rest) = text.strip_prefix("\x1b[") else {
        return 0;
    };
    let numbers = rest
        .bytes()
        .take_while(|byte| byte.is_ascii_digit() || *byte == b';')
        .count();
    if rest[numbers..].starts_with('m') {
        numbers + 3
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
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
    }
}
