//! Attribution of foreign memory: the processes that hold memory of a card, as far as they are visible.

use residency::{Bytes, Holder};

/// A process with a context on a card, as the driver lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardProcess {
    /// Process id, in a PID namespace that the driver does not name.
    pub pid: u32,
    /// Bytes held; unknown under MIG and WSL.
    pub bytes: Option<Bytes>,
}

/// Holder name for foreign memory if the driver's process list is of another PID namespace.
pub const UNSEEN: &str = "other processes (their PIDs are not visible from here)";
/// Holder name for foreign memory that exceeds the bytes of the listed processes.
pub const UNLISTED: &str = "others that the driver does not list";

/// Attributes `foreign` (allocated according to the driver, and not ours) to the processes that the driver lists.
///
/// `own` are processes of ours that certainly have a context on the card. A list that contains none of them is of
/// another PID namespace (a container shows the host's PIDs, or none), where an equal number would name an unrelated
/// process: then no process is named. `name_of` looks up a process.
///
/// The holders' bytes sum up to `foreign` exactly; the largest comes first.
pub fn foreign_holders(
    foreign: Bytes,
    processes: &[CardProcess],
    own: &[u32],
    name_of: impl Fn(u32) -> Option<String>,
) -> Vec<Holder> {
    if foreign == Bytes::ZERO {
        return Vec::new();
    }
    if !processes.iter().any(|process| own.contains(&process.pid)) {
        return vec![unnamed(UNSEEN, foreign)];
    }
    let name = |pid| name_of(pid).unwrap_or_else(|| "a process".to_owned());
    let others = merged(processes.iter().filter(|process| !own.contains(&process.pid)));
    let listed: u128 = others
        .iter()
        .filter_map(|process| process.bytes)
        .map(|bytes| u128::from(bytes.0))
        .sum();
    let mut holders: Vec<Holder> = others
        .iter()
        .filter_map(|process| {
            let bytes = scaled(process.bytes?, foreign, listed);
            (bytes > Bytes::ZERO).then(|| Holder {
                name: name(process.pid),
                pid: Some(process.pid),
                bytes,
            })
        })
        .collect();
    let rest = foreign - holders.iter().map(|holder| holder.bytes).sum();
    let silent: Vec<u32> = others
        .iter()
        .filter(|process| process.bytes.is_none())
        .map(|process| process.pid)
        .collect();
    if rest > Bytes::ZERO {
        // Rounding leaves a few bytes of a list that claims more than `foreign`: they are attributed to the listed
        // processes.
        let rounding = listed >= u128::from(foreign.0);
        match (silent.as_slice(), holders.first_mut()) {
            (_, Some(first)) if rounding => first.bytes += rest,
            ([], _) => holders.push(unnamed(UNLISTED, rest)),
            ([pid], _) => holders.push(Holder {
                name: name(*pid),
                pid: Some(*pid),
                bytes: rest,
            }),
            (several, _) => {
                let names: Vec<String> = several
                    .iter()
                    .map(|pid| format!("{} (pid {pid})", name(*pid)))
                    .collect();
                holders.push(unnamed(&names.join(", "), rest));
            }
        }
    }
    holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
    holders
}

/// The process's name, from the kernel.
pub fn process_name(pid: u32) -> Option<String> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

fn unnamed(name: &str, bytes: Bytes) -> Holder {
    Holder {
        name: name.to_owned(),
        pid: None,
        bytes,
    }
}

/// Merges duplicates: a process that computes and draws is listed twice with the same bytes.
fn merged<'a>(processes: impl Iterator<Item = &'a CardProcess>) -> Vec<CardProcess> {
    let mut once: Vec<CardProcess> = Vec::new();
    for process in processes {
        match once.iter_mut().find(|known| known.pid == process.pid) {
            Some(known) => known.bytes = known.bytes.max(process.bytes),
            None => once.push(*process),
        }
    }
    once.sort_by_key(|process| (std::cmp::Reverse(process.bytes), process.pid));
    once
}

/// Scales a process's bytes down where the listed processes claim more than `foreign`: the figures are of different
/// moments.
fn scaled(bytes: Bytes, foreign: Bytes, listed: u128) -> Bytes {
    if listed <= u128::from(foreign.0) {
        return bytes;
    }
    let share = u128::from(bytes.0) * u128::from(foreign.0) / listed;
    Bytes(u64::try_from(share).unwrap_or(u64::MAX))
}
