//! A bound that accounts share. One account is bounded itself, and the last part is kept for accounts that use nothing.

/// An eighth of a bound is kept for accounts that use nothing of it.
const KEPT_PART: u64 = 8;

/// The bound of all accounts together, and that of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedBound {
    pub all: u64,
    /// The last part, for accounts that use nothing.
    pub kept: u64,
    of_account: u64,
}

/// The bound that would be exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exceeded {
    /// The bound of all accounts.
    All,
    /// The bound of one account.
    Account,
    /// The rest is kept for accounts that use nothing.
    Kept,
}

impl SharedBound {
    /// A bound of which one account may have all but the kept part.
    pub fn new(all: u64) -> SharedBound {
        SharedBound::of(all, all - all / KEPT_PART)
    }

    /// A bound of which one account may have so much.
    pub fn of(all: u64, of_account: u64) -> SharedBound {
        let kept = all / KEPT_PART;
        SharedBound {
            all,
            kept,
            of_account,
        }
    }

    /// The same without a kept part.
    pub fn keeping_nothing(all: u64, of_account: u64) -> SharedBound {
        SharedBound {
            all,
            kept: 0,
            of_account,
        }
    }

    /// The bound of one account.
    pub fn of_account(self) -> u64 {
        self.of_account
    }

    /// What accounts that use something may have together.
    fn of_users(self) -> u64 {
        self.all - self.kept
    }

    /// Checks whether an account may take `more`. `own` is the part of `taken` that the account uses.
    ///
    /// # Errors
    /// The bound that would be exceeded.
    pub fn check(self, taken: u64, own: u64, more: u64) -> Result<(), Exceeded> {
        let (taken, own) = (taken.saturating_add(more), (own, own.saturating_add(more)));
        if taken > self.all {
            return Err(Exceeded::All);
        }
        if own.1 > self.of_account() {
            return Err(Exceeded::Account);
        }
        match own.0 > 0 && taken > self.of_users() {
            true => Err(Exceeded::Kept),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_has_seven_eighths_and_the_last_is_for_those_that_have_nothing() {
        let bound = SharedBound::new(16);
        assert_eq!(bound.check(0, 0, 14), Ok(()));
        assert_eq!(bound.check(0, 0, 15), Err(Exceeded::Account));
        assert_eq!(bound.check(14, 13, 1), Err(Exceeded::Kept));
        assert_eq!(bound.check(14, 0, 2), Ok(()));
        assert_eq!(bound.check(15, 0, 2), Err(Exceeded::All));
        assert_eq!(bound.check(u64::MAX, u64::MAX, 1), Err(Exceeded::All));
        assert_eq!(
            SharedBound::new(7).check(6, 6, 1),
            Ok(()),
            "an eighth of it is none"
        );
    }
}
