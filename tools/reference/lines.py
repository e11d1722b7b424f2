"""Lines of text for comparisons of tokenizers: languages, code, numbers, white space, and random mixtures of them."""

from __future__ import annotations

import random

LANGUAGES = """
The quick brown fox doesn't jump; it's we'll who'd've said "I'M HERE" and she'LL say they're right.
Der Käfig ging einen Vogel suchen, und die Straße führte über die Brücke; Äpfel, ÖL, Übermaß.
L'été dernier, nous étions à la plage où l'eau était claire. Ça va ? Où êtes-vous, cœur d'ÉTÉ ?
El niño pidió una piñata; ¿dónde está el camión? ¡Qué lástima, señor!
Não há razão para preocupação, disse a avó à criança. Amanhã é outro dia.
W Szczebrzeszynie chrząszcz brzmi w trzcinie i Szczebrzeszyn z tego słynie.
Příliš žluťoučký kůň úpěl ďábelské ódy. Nechť již hříšné saxofony ďáblů rozezvučí síň.
Őszintén szólva az árvíztűrő tükörfúrógép jól működik.
Pijamalı hasta yağız şoföre çabucak güvendi. İSTANBUL'da ışık, İzmir'de ığdır.
Съешь же ещё этих мягких французских булок, да выпей чаю. ПРИВЕТ Мир, 25-й километр.
Чуєш їх, доцю, га? Кумедна ж ти, прощайся без ґольфів!
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ΑΘΗΝΑ είναι η πρωτεύουσα.
שָׁלוֹם עולם, איך הולך היום? הכול בסדר, תודה רבה.
مرحبا بالعالم، كيف حالك اليوم؟ اللُّغَةُ العَرَبِيَّةُ جميلة.
سلام دنیا، امروز هوا خوب است. می‌خواهم به خانه بروم.
नमस्ते दुनिया, आप कैसे हैं? हिन्दी में क्षत्रिय और ज्ञान लिखना।
বাংলা ভাষা খুব সুন্দর। আমি তোমাকে ভালোবাসি।
தமிழ் மொழி மிகவும் பழமையானது. வணக்கம் உலகம்!
తెలుగు భాష చాలా అందమైనది. నమస్కారం.
สวัสดีชาวโลก วันนี้อากาศดีมาก ภาษาไทยไม่มีช่องว่างระหว่างคำ
ສະບາຍດີຊາວໂລກ ພາສາລາວ
ကမ္ဘာလောကမှ မင်္ဂလာပါ မြန်မာစာ
សួស្តី​ពិភពលោក ភាសាខ្មែរ
你好,世界!今天天气很好，我们去公园散步吧。共有３个苹果和二十五本书。
臺灣的繁體中文，標點「符號」、書名號《紅樓夢》……
こんにちは、世界。カタカナとひらがなと漢字が混ざっています。ﾊﾝｶｸもあります。
안녕하세요 세계! 오늘은 날씨가 아주 좋네요. ㄱㄴㄷ ㅏㅑㅓ
Xin chào thế giới, hôm nay trời đẹp quá! Tiếng Việt có nhiều dấu.
Habari dunia, leo hali ya hewa ni nzuri sana.
ሰላም ለዓለም። አማርኛ ቋንቋ ነው።
Բարեւ աշխարհ։ გამარჯობა მსოფლიო. Сайн байна уу, дэлхий.
ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ᐃᓄᒃᑎᑐᑦ ⵜⴰⵎⴰⵣⵉⵖⵜ
""".strip().split("\n")
CODE = """
def f(x: int=3) -> list[str]:\\n    return [f"{i:>{w}}" for i in range(x)]  # don't
for (int i=0;i<n;++i) { a[i] += b[i]*c[i]; } // TODO(me): fix!!
#include <stdio.h>\\nint main(void){printf("%d\\\\n",0x1F);return 0;}
SELECT * FROM users WHERE id IN (1,2,3) AND name LIKE '%a_b%';
const f = async ({a, b}) => await fetch(`/api/${a}?x=${b}`);
<div class="a b" id='x'><br/>&nbsp;&amp;</div><!-- comment -->
{"key": [1, 2.50, -3e+10, null, true], "ключ": "値"}
git commit -m "fix(core): don't crash" && ./run.sh --flag=1 | grep -v '^#'
\\tif err != nil {\\n\\t\\treturn fmt.Errorf("x: %w", err)\\n\\t}
camelCaseName snake_case_name CONST_NAME kebab-case-name HTTPServer2XMLParser iPhone15Pro
https://example.com/a/b?c=d&e=f#g user.name+tag@example.co.uk C:\\\\Users\\\\me\\\\x.txt /usr/local/bin
$x = @{a=1}; %hash{'k'} =~ s/a/b/gi; **kw *args @decorator ::ns->m() !== <=> ?? ?. |> ||= <<~EOS
""".strip().split("\n")
NUMBERS = """
0 1 12 123 1234 12345 123456 1234567 12345678 123456789 1234567890
3.14159 2,718,281 1e-5 6.022E23 0xDEADBEEF 0b1010 1_000_000 50% $19.99 €1.234,56 №7 ½ ² ³ ⅷ Ⅻ ④
２０２６年１１月 ١٢٣٤٥ १२३४ ๑๒๓ 12:34:56 2026-11-22T10:30:00Z +49 (30) 1234-5678 v1.2.3-rc4
1a2b3c a1b22c333d4444 x86_64 H2O CO₂ E=mc² 10km 5'11" 3rd 4TH 100kg
""".strip().split("\n")
SPACES = [
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\t\t "),
    *("\u3000", "\u00a0", "\u2003", "\u200b", "\u0085", "\x0b"),
]
MARKS = [
    *"!?.,;:'\"()[]{}<>/\\|-_=+*&^%$#@~`…—–“”‘’«»¿¡。、，！？：；（）【】《》・·•→←↑↓≤≥≠±×÷∞√∑∫∂π©®™°§¶†‡€£¥₹₿",
    "👍",
    "👨‍👩‍👧‍👦",
    "🏳️‍🌈",
    "🇩🇪",
    "e\u0301",
    "\u0301",
    "\u200d",
    "\ufe0f",
    "\ufeff",
    "\x00",
    "\x1f",
    "\x7f",
    "\U0001d400",
    "𠀀",
    "\u2581",
    "\ufffd",
    "\ue000",
    "'s",
    "'S",
    "'ll",
    "'VE",
    "'re",
    "'x",
    "<|im_start|>",
    "<s>",
    "[INST]",
]
CASES = ["ǅ", "ʰ", "ª", "ǅungla", "ÉTUDE", "éTé", "aÉb", "ABCdef", "abcDEF", "ÀÉî", "ﬁ", "ß", "İ", "ı", "ſ", "K"]


def written() -> list[str]:
    """The lines above."""
    lines = [*LANGUAGES, *CODE, *NUMBERS]
    return [line.replace("\\n", "\n").replace("\\t", "\t") for line in lines]


def make_lines(count: int, seed: int = 0) -> list[str]:
    """Return `count` lines: the written ones, then mixtures. The same arguments give the same lines."""
    rng = random.Random(seed)
    lines = written()
    words = [word for line in lines for word in line.split(" ")]
    mixtures = list(lines)
    while len(mixtures) < count:
        parts: list[str] = []
        kind = rng.randrange(6)
        for _ in range(rng.randint(1, 14)):
            pool = (words, SPACES, MARKS, CASES)[rng.choices(range(4), (8, 5, 3, 1) if kind < 4 else (3, 6, 6, 3))[0]]
            parts.append(rng.choice(pool))
            if kind in (0, 1) and rng.random() < 0.8:
                parts.append(" ")
            elif kind == 2 and rng.random() < 0.2:
                parts.append("".join(rng.choices("0123456789", k=rng.randint(1, 9))))
            elif kind == 5 and rng.random() < 0.3:
                parts.append(rng.choice(parts) * rng.randint(2, 9))
        mixtures.append("".join(parts))
    return mixtures[:count]
