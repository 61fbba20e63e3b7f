//! Foreign text (names, messages, files) made safe for display: without characters that terminals obey, such as those that change
//! the direction of the text beside them, and without characters that nobody sees.

mod hidden;

use std::borrow::Cow;
use std::fmt::Write as _;

use hidden::{Hidden, hidden, is_odd_space};

/// A text as one line: hidden characters are escaped, line breaks too.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

/// A text of several lines: line breaks and tabs stay, the rest is escaped.
pub fn lines(text: &str) -> Cow<'_, str> {
    escaped(text, |character| matches!(character, '\n' | '\t'))
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

/// Why a text is no name: who reads it would not see all of it, or it is too long.
pub fn name_problem(name: &str) -> Option<String> {
    for (character, reason) in hidden(name) {
        let code = u32::from(character);
        match reason {
            Some(Hidden::Obeyed) => {
                return Some(
                    "has control characters, or such that turn the direction of text: leave them out"
                        .to_owned(),
                );
            }
            Some(Hidden::Unseen) => {
                return Some(format!(
                    "has a character that nobody sees (U+{code:04X}): leave it out"
                ));
            }
            Some(Hidden::Stacked) => {
                return Some(format!(
                    "has too many marks on one character, or a mark on none (U+{code:04X}): leave it out"
                ));
            }
            None if is_odd_space(character) => {
                return Some(format!(
                    "has a space that is not the ordinary one (U+{code:04X}): write an ordinary space"
                ));
            }
            None => {}
        }
    }
    if name.starts_with(' ') || name.ends_with(' ') {
        return Some("begins or ends with a space: leave it out".to_owned());
    }
    let characters = name.chars().count();
    (characters > LONGEST_NAME_CHARACTERS)
        .then(|| format!("has {characters} characters; {LONGEST_NAME_CHARACTERS} are the most"))
}

/// A value as JSON in one line. JSON itself does not escape all hidden characters, so these are escaped here.
pub fn json(value: &serde_json::Value) -> String {
    let text = value.to_string();
    if !has_hidden(&text) {
        return text;
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for (character, reason) in hidden(&text) {
        match reason {
            Some(_) => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    let _ = write!(shown, "\\u{unit:04x}"); // writing to a text does not fail
                }
            }
            None => shown.push(character),
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

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !has_hidden(text) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for (character, reason) in hidden(text) {
        match reason {
            Some(_) if !stays(character) => shown.extend(character.escape_default()),
            _ => shown.push(character),
        }
    }
    Cow::Owned(shown)
}

fn has_hidden(text: &str) -> bool {
    hidden(text).any(|(_, reason)| reason.is_some())
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

    /// Texts that people write, in scripts whose letters are shaped by invisible characters.
    const PLAIN: [&str; 14] = [
        "",
        "ann@studio",
        "Grün, 日本 🟥",
        "Nguyê\u{303}n Vă\u{301}n",
        "\u{915}\u{94d}\u{200d}\u{937} \u{915}\u{94d}\u{200c}\u{937}",
        "\u{645}\u{6cc}\u{200c}\u{62e}\u{648}\u{627}\u{647}\u{645}",
        "\u{5e9}\u{5c1}\u{5bc}\u{5b8}\u{597}",
        "\u{f66}\u{f90}\u{fb1}\u{f7c}",
        "❤\u{fe0f}\u{200d}🔥 👩🏽\u{200d}💻 1\u{fe0f}\u{20e3} 🇩🇪",
        "\u{845b}\u{e0100}",
        "\u{1112}\u{1161}\u{11ab}",
        "\u{e01}\u{e47}\u{e49}",
        "\u{600}\u{661}",
        "a_b-c/d:e.f (1)",
    ];

    /// Texts with what nobody sees, or what covers others: each is refused as a name, and escaped where it is shown.
    const HIDDEN: [&str; 24] = [
        "a\u{200b}b",
        "\u{feff}a",
        "a\u{ad}b",
        "a\u{e0061}\u{e0062}",
        "🏴\u{e0067}\u{e0062}",
        "\u{3164}",
        "\u{115f}a",
        "\u{ffa0}",
        "a\u{2060}",
        "a\u{200d}b",
        "a\u{200c}b",
        "\u{200d}",
        "a\u{fe0f}",
        "1\u{fe0f}",
        "😀\u{fe0f}\u{fe0e}",
        "😀\u{e0100}\u{e0101}",
        "a\u{34f}b",
        "a\u{fff9}b",
        "a\u{180e}",
        "a\u{202e}b",
        "a\u{2067}b",
        "\u{301}a",
        "a \u{301}",
        "a\u{300}\u{301}\u{302}\u{303}\u{304}",
    ];

    #[test]
    fn names_show_all_their_characters() {
        for name in PLAIN {
            assert_eq!(name_problem(name), None, "{name:?}");
            assert_eq!(one_line(name), name);
            assert_eq!(json(&name.into()), serde_json::Value::from(name).to_string());
        }
        for name in HIDDEN {
            assert!(name_problem(name).is_some(), "{name:?}");
            assert!(one_line(name).contains("\\u{"), "{name:?}");
            assert!(lines(name).contains("\\u{"), "{name:?}");
            let shown = json(&name.into());
            assert!(!has_hidden(&shown), "{name:?}");
            assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), name);
        }
        for name in [" a", "a ", " ", "a\u{a0}b", "a\u{3000}b", "\u{2800}", "a\tb"] {
            assert!(name_problem(name).is_some(), "{name:?}");
        }
    }

    #[test]
    fn what_is_shown_has_nothing_hidden() {
        bolero::check!().with_type::<String>().for_each(|text| {
            assert!(!has_hidden(&one_line(text)));
            assert_eq!(
                serde_json::from_str::<String>(&json(&text.as_str().into())).unwrap(),
                *text
            );
        });
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
