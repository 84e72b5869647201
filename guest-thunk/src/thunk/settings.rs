//! The environment variables of AMD's library that mean something here, and those of this library's own.

use std::sync::Once;

use crate::thunk::refusal::tell;

/// What becomes of memory of the application that is registered: `adopt`, `adopt-variables` or `refuse`.
const REGISTER: &str = "VIRTIO_KFD_REGISTER";

/// `userfaultfd` or `ptrace`, for how writers are held while memory is adopted; else the first that this process may use.
pub const HOLD: &str = "VIRTIO_KFD_REGISTER_HOLD";

/// Whether programs get pages of HDP flush registers: `trap` or `none`.
const HDP: &str = "VIRTIO_KFD_HDP";

/// Settings of one open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `HSA_OVERRIDE_GFX_VERSION=major.minor.stepping`; an error where it is set and not of this form.
    pub gfx_override: Result<Option<(u32, u32, u32)>, InvalidOverride>,
    /// `HSA_DISABLE_CACHE`: memory is uncached and coherent.
    pub disable_cache: bool,
    /// `HSA_SVM_GUARD_PAGES`: pages that stay inaccessible behind each allocation.
    pub guard_pages: u64,
    /// `HSA_MAX_VA_ALIGN`: addresses of large allocations are aligned to up to a page times 2 to this power.
    pub alignment_order: u32,
    /// `VIRTIO_KFD_REGISTER` (this library's own): what becomes of memory of the application that is registered.
    pub registration: Registration,
    /// `VIRTIO_KFD_HDP` (this library's own): whether GPUs have a page of HDP flush registers.
    pub hdp: HdpFlush,
    /// Whether all memory is executable for GPUs, of no variable: the caller's age decides.
    pub all_executable: bool,
}

/// Whether GPUs have a page of HDP flush registers (`HSA_HEAPTYPE_MMIO_REMAP`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HdpFlush {
    /// They have none, so that runtimes do not write to VRAM what needs a flush.
    #[default]
    None,
    /// `trap`: they have one whose stores trap, where the host can give it.
    Trap,
}

/// What becomes of memory of the application that is registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Registration {
    /// It is refused, so that runtimes copy in stages.
    #[default]
    Refuse,
    /// `adopt`: the memory is taken over in place.
    Adopt,
    /// `adopt-variables`: also that of variables, on stacks and in the data of programs.
    AdoptVariables,
}

/// `HSA_OVERRIDE_GFX_VERSION` is set to something that is no version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidOverride;

impl Default for Settings {
    fn default() -> Self {
        Settings {
            gfx_override: Ok(None),
            disable_cache: false,
            guard_pages: 1,
            alignment_order: 9,
            registration: Registration::Refuse,
            hdp: HdpFlush::None,
            all_executable: true,
        }
    }
}

impl Settings {
    /// Reads the environment. A value of this library's own variables that it does not know is told of once, whatever
    /// `HSAKMT_DEBUG_LEVEL` says: nobody else sets them, and what was meant does not come to pass.
    pub fn from_environment() -> Self {
        static TOLD: Once = Once::new();
        let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        TOLD.call_once(|| unknown(variable).iter().for_each(|sentence| tell(sentence)));
        Self::from_variables(variable)
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let default = Settings::default();
        let number = |name| variable(name).and_then(|value| value.trim().parse::<u32>().ok());
        Settings {
            gfx_override: variable("HSA_OVERRIDE_GFX_VERSION").map(|value| parse_gfx(&value)).transpose(),
            disable_cache: variable("HSA_DISABLE_CACHE").is_some_and(|value| value != "0"),
            // Bounds keep a mistyped variable from taking the whole address space with each allocation.
            guard_pages: number("HSA_SVM_GUARD_PAGES")
                .map_or(default.guard_pages, |n| u64::from(n.min(4096))),
            alignment_order: number("HSA_MAX_VA_ALIGN").map_or(default.alignment_order, |n| n.min(18)),
            registration: match variable(REGISTER).as_deref() {
                Some("adopt") => Registration::Adopt,
                Some("adopt-variables") => Registration::AdoptVariables,
                _ => Registration::Refuse,
            },
            hdp: match variable(HDP).as_deref() {
                Some("trap") => HdpFlush::Trap,
                _ => HdpFlush::None,
            },
            all_executable: default.all_executable,
        }
    }
}

/// A sentence for each of this library's variables whose value is none that it knows.
fn unknown(variable: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let choices: [(&str, &[&str], &str); 3] = [
        (REGISTER, &["adopt", "adopt-variables", "refuse"], "memory that is registered is refused"),
        (HOLD, &["ptrace", "userfaultfd"], "the library chooses"),
        (HDP, &["trap", "none"], "GPUs have no page of HDP flush registers"),
    ];
    let sentence = |(name, known, then): (&str, &[&str], &str)| {
        let value = variable(name).filter(|value| !value.is_empty() && !known.contains(&&**value))?;
        let (last, others) = known.split_last()?;
        Some(format!("{name} is {value:?}, expected {} or {last}: {then}", others.join(", ")))
    };
    choices.into_iter().filter_map(sentence).collect()
}

fn parse_gfx(value: &str) -> Result<(u32, u32, u32), InvalidOverride> {
    let mut parts = value.split('.').map(|part| part.parse::<u32>().map_err(|_| InvalidOverride));
    let mut part = |max| match parts.next() {
        Some(Ok(number)) if number <= max => Ok(number),
        _ => Err(InvalidOverride),
    };
    // The widths of the fields of HSA_ENGINE_ID.
    let version = (part(63)?, part(255)?, part(255)?);
    parts.next().map_or(Ok(version), |_| Err(InvalidOverride))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Settings {
        Settings::from_variables(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn nothing_set_is_the_default() {
        assert_eq!(Settings::from_variables(|_| None), Settings::default());
    }

    #[test]
    fn gfx_override() {
        let gfx = |value| with("HSA_OVERRIDE_GFX_VERSION", value).gfx_override;
        assert_eq!(gfx("10.3.0"), Ok(Some((10, 3, 0))));
        for bad in ["", "10", "10.3", "10.3.0.1", "64.0.0", "9.256.0", "9.0.a"] {
            assert_eq!(gfx(bad), Err(InvalidOverride), "{bad:?}");
        }
    }

    #[test]
    fn switches_and_numbers() {
        assert!(with("HSA_DISABLE_CACHE", "1").disable_cache);
        assert!(!with("HSA_DISABLE_CACHE", "0").disable_cache);
        assert_eq!(with("HSA_SVM_GUARD_PAGES", "3").guard_pages, 3);
        assert_eq!(with("HSA_MAX_VA_ALIGN", "99").alignment_order, 18);
        assert_eq!(with("VIRTIO_KFD_REGISTER", "adopt").registration, Registration::Adopt);
        let variables = with("VIRTIO_KFD_REGISTER", "adopt-variables").registration;
        assert_eq!(variables, Registration::AdoptVariables);
        assert_eq!(with("VIRTIO_KFD_REGISTER", "1").registration, Registration::Refuse);
        assert_eq!(with("VIRTIO_KFD_HDP", "trap").hdp, HdpFlush::Trap);
        assert_eq!(with("VIRTIO_KFD_HDP", "1").hdp, HdpFlush::None);
    }

    #[test]
    fn values_that_are_not_known_are_told_of() {
        let told = |name: &str, value: &str| unknown(|asked| (asked == name).then(|| value.to_owned()));
        let register = "VIRTIO_KFD_REGISTER is \"Adopt\\n\", expected adopt, adopt-variables or refuse: memory that is \
                        registered is refused";
        assert_eq!(told(REGISTER, "Adopt\n"), [register]);
        assert_eq!(told(HOLD, "uffd").len(), 1);
        assert_eq!(told(HDP, "1").len(), 1);
        let known = [
            (REGISTER, "adopt"),
            (REGISTER, "adopt-variables"),
            (REGISTER, "refuse"),
            (REGISTER, ""),
            (HOLD, "ptrace"),
            (HDP, "trap"),
        ];
        for (name, value) in known {
            assert_eq!(told(name, value), [""; 0], "{name}={value}");
        }
    }
}
