"""Common English words: with a space before it, each is one token of nearly every vocabulary."""

from __future__ import annotations

_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even most
made after also did many off before must well back through years where much your way down should because long each
just state those people too mr how little good world make very year still see own work men day get here old life both
between under last right move go such high place against always school another home small found water house number
part night point light city never earth father head stood page country answer study learn plant cover food sun four
keep eye let thought cross farm hard start might story saw far sea draw left late run while press close real few north
open seem together next white children begin got walk example ease paper group music often letter until mile river car
feet care second book carry took science eat room friend began idea fish mountain stop once base hear horse cut sure
watch color face wood main enough plain girl usual young ready above ever red list though feel talk bird soon body dog
family direct pose leave song measure door product black short class wind question happen complete ship area half rock
order fire south problem piece told knew pass since top whole king space heard best hour better true during hundred
five remember step early hold west ground interest reach fast verb sing listen six table travel less morning ten
simple several vowel toward war lay pattern slow center love person money serve appear road map rain rule govern pull
cold notice voice unit power town fine certain fly fall lead cry dark machine note wait plan figure star box noun
field rest correct able pound done beauty drive stood contain front teach week final gave green oh quick develop ocean
warm free minute strong special mind behind clear tail produce fact street inch multiply nothing course stay wheel
full force blue object decide surface deep moon island foot system busy test record boat common gold possible plane
stead dry wonder laugh thousand ago ran check game shape hot miss brought heat snow tire bring yes distant fill east
paint language among
"""

WORDS = tuple(dict.fromkeys(_TEXT.split()))
